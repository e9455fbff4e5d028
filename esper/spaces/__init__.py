"""The interface between env and controller: actions, masks and observations."""
