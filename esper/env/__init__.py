"""The environment: training hosts behind the Gymnasium vector API. Importing it registers ``esper/Growth-v0``."""

import gymnasium

if "esper/Growth-v0" not in gymnasium.registry:
    gymnasium.register(
        id="esper/Growth-v0",
        entry_point="esper.env.make:make_single",
        vector_entry_point="esper.env.make:make_vector",
    )
