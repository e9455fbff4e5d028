"""The environment: training hosts behind the Gymnasium vector API."""
