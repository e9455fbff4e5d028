"""Hosts that differ, plans to grow them, and what each plan brings."""
