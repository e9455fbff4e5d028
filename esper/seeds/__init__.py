"""Seeds: their modules and blueprints, how they are blended in, and the sites of hosts that hold them."""
