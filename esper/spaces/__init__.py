"""Tables of what is sent over the seam between the env and a controller: actions, masks, observations."""
