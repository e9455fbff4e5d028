"""Typed telemetry: events, the hub that routes them, and the sinks that receive them."""
