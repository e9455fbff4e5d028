"""All parameters of a run, one file a section or two, and what reads them."""

from esper.config.controllers import HeuristicConfig as HeuristicConfig
from esper.config.controllers import PlansConfig as PlansConfig
from esper.config.controllers import PlateauConfig as PlateauConfig
from esper.config.files import read_toml as read_toml
from esper.config.files import set_dotted as set_dotted
from esper.config.learning import ExperienceConfig as ExperienceConfig
from esper.config.learning import PPOConfig as PPOConfig
from esper.config.task import Optimizer as Optimizer
from esper.config.task import Precision as Precision
from esper.config.task import TaskConfig as TaskConfig
from esper.config.telemetry import AnomalyConfig as AnomalyConfig
from esper.config.telemetry import TrackConfig as TrackConfig
from esper.config.training import Durations as Durations
from esper.config.training import EnvConfig as EnvConfig
from esper.config.training import GateConfig as GateConfig
from esper.config.training import GovernorConfig as GovernorConfig
from esper.config.training import RewardConfig as RewardConfig
from esper.config.training import RewardMode as RewardMode
from esper.config.training import RunConfig as RunConfig
from esper.config.training import TrainingConfig as TrainingConfig
from esper.config.types import describe_fields as describe_fields
from esper.errors import ConfigError as ConfigError
from esper.errors import did_you_mean as did_you_mean
