"""The environment: training hosts behind the Gymnasium vector API."""

from esper.env import registration as registration
