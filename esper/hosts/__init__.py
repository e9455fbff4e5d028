"""Hosts: the networks that are trained and grown."""
