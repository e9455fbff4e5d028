"""Hosts: networks that are trained and grown."""
