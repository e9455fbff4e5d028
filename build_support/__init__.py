"""What setup.py needs to build Esper's compiled modules; not part of the installed package."""
