"""The environment: hosts in training behind the Gymnasium vector API."""
