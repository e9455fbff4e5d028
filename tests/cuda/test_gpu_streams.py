"""Streams of a GPU: hosts that grow there, captured, queued or held up, are the same hosts to the last bit."""

import gc
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from esper.config import TrainingConfig
from esper.core.blueprints import BLUEPRINTS, BlueprintRegistry
from esper.core.stage import SeedStage
from esper.run.experiment import Experiment
from esper.training import step as host_step
from esper.training.execution.gpu import Gpu
from esper.training.execution.graph_cache import WAITS
from esper.training.execution.streams import StreamExecutor
from esper.training.execution.workers import WorkerExecutor
from esper.training.executor import HostError
from esper.training.host_training import HostTraining
from tests.run.run_helpers import Does, same_run, stop, within_round
from tests.training.growing import KINDS, Dropping, Growing, Kind, assert_same, validate

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:.*deterministic.*:UserWarning"),
]

# cuBLAS looks here when it is first used, and adds up in a fixed order then.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

S = SeedStage


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Libraries choose algorithms that give the same bits every time, and compute with all of float32."""
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    before = (cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, cublas.allow_tf32)
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, cublas.allow_tf32 = (
        True,
        False,
        False,
        False,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with sdpa_kernel(SDPBackend.MATH):
        yield
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, cublas.allow_tf32 = before


def growing(
    kind: str,
    n: int = 2,
    capture: bool = True,
    registry: BlueprintRegistry = BLUEPRINTS,
) -> Growing:
    made = Growing(
        KINDS[kind],
        StreamExecutor(Gpu(torch.device("cuda")), capture),
        n,
        "cuda",
        registry,
    )
    made.reset()
    return made


def executor_of(made: Growing) -> StreamExecutor:
    assert isinstance(made.executor, StreamExecutor)
    return made.executor


def captured(made: Growing) -> int:
    return sum(len(graphs) for graphs in executor_of(made).graphs.values())


@pytest.mark.parametrize("kind", KINDS)
def test_captured_hosts_grow_as_others_do_to_the_last_bit(kind: str) -> None:
    with growing(kind, capture=False) as plain:
        expected = plain.episodes(2, 6)
    with growing(kind) as made:
        found = made.episodes(2, 6)
        assert executor_of(made).reasons() == {}
        assert captured(made) > 2
        assert_same(found, expected)


def test_a_few_captured_epochs() -> None:
    """A minimal case for a sanitizer: steps that are warmed up, captured and launched, and validation."""
    with growing("bytes", n=2) as made:
        made.plant(0, "r0c0", S.HOLDING)
        made.plant(1, "r0c0", S.TRAINING)
        for _ in range(2):
            made.epoch()
        assert executor_of(made).reasons() == {}
        assert captured(made) > 2


@pytest.mark.parametrize("kind", ["float images", "ste", "bytes", "text"])
def test_a_gpu_and_a_cpu_train_the_same_hosts_but_for_rounding(kind: str) -> None:
    found = []
    for world in (
        Growing(KINDS[kind], WorkerExecutor(1)),
        growing(kind, capture=False),
    ):
        with world as made:
            made.reset()
            slots = [slot.name for slot in made.hosts[0].sites]
            blueprint = "attention" if kind == "text" else "conv_light"
            made.plant(0, slots[0], S.HOLDING, blueprint)
            made.plant(1, slots[-1], S.TRAINING, blueprint)
            found.append(made.epoch())
    for cpu, cuda in zip(*found, strict=True):
        assert cpu.keys() == cuda.keys()
        assert torch.equal(cpu["order"], cuda["order"])
        for name, tensor in cpu.items():
            if (
                tensor.is_floating_point()
                and not name.endswith("gradients")
                and name not in ("stats", "training")
            ):
                torch.testing.assert_close(
                    cuda[name], tensor, rtol=1e-2, atol=2e-3, msg=name
                )
        torch.testing.assert_close(
            cuda["training"][0], cpu["training"][0], rtol=1e-3, atol=0
        )
        torch.testing.assert_close(
            cuda["stats"][:, 0], cpu["stats"][:, 0], rtol=1e-2, atol=0
        )


class OneStream(Gpu):
    """Every host is on the same stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.only = super().stream()

    def stream(self) -> torch.cuda.Stream:
        return self.only


class Delays:
    """Queues products of matrices, few or many, which delay later work on the current stream."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.matrix = torch.eye(512, device="cuda")

    def __call__(self) -> None:
        product = self.matrix
        for _ in range(self.dice.choice((0, 1, 5, 40))):
            product = product @ self.matrix


class HeldUp(Growing):
    """Growing, with delays on every stream."""

    delays: Delays

    def reset(self, episode: int = 0) -> None:
        self.delays()
        super().reset(episode)
        self.delays()

    def act(self, dice: random.Random) -> None:
        self.delays()
        super().act(dice)
        self.delays()

    def validate(self) -> None:
        def late(env: HostTraining) -> None:
            self.delays()
            validate(env)
            self.delays()

        self.executor.run(late, self.hosts)


@pytest.mark.finding("C1")
@pytest.mark.trap(32)
@pytest.mark.parametrize("capture", [True, False], ids=["captured", "queued"])
@pytest.mark.parametrize("seed", [0, 1])
def test_many_streams_with_delays_equal_one(
    capture: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS["bytes"]
    with Growing(
        kind, StreamExecutor(OneStream(torch.device("cuda")), captures=False), 6, "cuda"
    ) as plain:
        expected = plain.episodes(2, 4, seed)
    delays, inner = Delays(seed), host_step.train_step

    def train_step(env: HostTraining, *rest: object) -> None:
        delays()
        inner(env, *rest)  # type: ignore[arg-type]
        delays()

    monkeypatch.setattr("esper.training.execution.streams.train_step", train_step)
    with HeldUp(
        kind, StreamExecutor(Gpu(torch.device("cuda")), capture), 6, "cuda"
    ) as made:
        made.delays = delays
        assert_same(made.episodes(2, 4, seed), expected)
        assert (captured(made) > 6) is capture


@pytest.mark.trap(40)
def test_rates_alphas_and_targets_act_without_a_new_capture() -> None:
    with growing("bytes", capture=False) as plain, growing("bytes") as made:
        for world in (plain, made):
            for env in range(2):
                world.plant(env, "r0c0", S.HOLDING)
                world.plant(env, "r1c0", S.TRAINING)
        for _ in range(2):
            assert_same(made.epoch(), plain.epoch())
        before = captured(made)
        assert before == 4  # a step and a validation of each env
        for alpha in (0.3, 0.7):
            for world in (plain, made):
                for training in world.hosts:
                    training.site_by_name["r0c0"].alpha = alpha
                    training.site_by_name["r1c0"].target = 1 - alpha
            assert_same(made.epoch(), plain.epoch())
        assert captured(made) == before


def test_captured_work_serves_later_rounds() -> None:
    with growing("float images") as made:
        for _ in range(3):
            made.episodes(1, 6)
        before = captured(made)
        made.episodes(1, 6)
        assert captured(made) == before


@pytest.mark.trap(33)
@pytest.mark.parametrize("capture", [True, False], ids=["captured", "queued"])
@pytest.mark.parametrize(
    "kind", ["float images", "bytes in bfloat16, micro-batches", "text"]
)
def test_nothing_waits_for_the_gpu_within_an_epoch(kind: str, capture: bool) -> None:
    with growing(kind, capture=capture) as made:
        slot = made.hosts[0].sites[0].name
        blueprint = "attention" if kind == "text" else "conv_light"
        made.plant(0, slot, S.HOLDING, blueprint)
        made.plant(1, slot, S.TRAINING, blueprint)
        for _ in range(2):
            made.epoch()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            made.trainer.epoch(made.hosts)
            made.validate()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        assert executor_of(made).reasons() == {}


def test_work_that_is_dropped_all_at_once_leaves_nothing_behind_that_others_need() -> (
    None
):
    """When a graph is destroyed, torch frees the workspaces of cuBLAS on its stream, and an empty pool is lost."""
    with growing("text", capture=False) as plain:
        expected = plain.episodes(3, 6)
    with growing("text") as made:
        for env in made.hosts:
            executor_of(made).graphs[env.index].limit = 2
        assert_same(made.episodes(3, 6), expected)
        assert executor_of(made).reasons() == {}


@pytest.mark.finding("C4")
def test_memory_is_flat_over_topologies() -> None:
    dice, allocated, reserved = random.Random(0), list[int](), list[int]()
    with growing("float images", n=1) as made:
        executor_of(made).graphs[made.hosts[0].index].limit = 6
        for epoch in range(1, 97):
            made.act(dice)
            made.epoch()
            if epoch % 8 == 0:
                made.reset(epoch)
            if epoch in (32, 96):
                gc.collect()
                torch.cuda.synchronize()
                allocated.append(torch.cuda.memory_allocated())
                reserved.append(torch.cuda.memory_reserved())
    mib = 2**20
    assert allocated[1] <= allocated[0] + 48 * mib, (
        allocated
    )  # cuBLAS has its workspace at one of them, or not
    assert reserved[1] <= reserved[0] + 128 * mib, reserved


@pytest.mark.trap(35)
def test_forty_envs_have_forty_streams() -> None:
    with growing("float images", n=40, capture=False) as plain:
        expected = [plain.epoch() for _ in range(2)]
    with growing("float images", n=40) as made:
        for records in expected:
            assert_same(made.epoch(), records)
        handles = {stream.cuda_stream for stream in executor_of(made)._streams.values()}
        assert len(handles) == 40
        assert all(
            stream.query() for stream in executor_of(made)._streams.values()
        )  # read: they were waited for


class Waiting(nn.Module):
    """Asks the GPU for a number in every pass."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, h: Tensor) -> Tensor:
        return self.scale * (h - h.detach().mean().item())


class Shy(Waiting):
    """Refuses to be captured, before anything is wrong."""

    def forward(self, h: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("not while you watch")
        return self.scale * h


class Blunt(Shy):
    """Waits in a way that torch does not warn of, so that its capture is cut off."""

    def forward(self, h: Tensor) -> Tensor:
        torch.cuda.synchronize()
        return self.scale * h


ODD: dict[str, tuple[Callable[[int], nn.Module], int, str]] = {
    "dropout": (Dropping, 2, "dropout: launched without torch"),
    "waits": (Waiting, 1, WAITS),
    "shy": (Shy, 1, "ValueError: not while you watch"),
    "blunt": (Blunt, 1, ""),
}
"""Seeds, how many parameters they have for each channel, and why their steps are not captured."""


@pytest.mark.parametrize("odd", ODD)
def test_seeds_that_cannot_be_captured_train_as_ever_and_leave_no_trace(
    odd: str,
) -> None:
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if odd == "blunt" and version < (2, 13):
        pytest.skip(
            "before 2.13, torch's allocator does not get over a capture that was cut off"
        )
    build, each, reason = ODD[odd]
    registry = BLUEPRINTS.copy()
    registry.register("cnn", "odd", parameters=lambda c: each * c)(build)
    worlds = [
        growing("float images", capture=capture, registry=registry)
        for capture in (False, True)
    ]
    plain, made = worlds
    with plain, made:
        for world in worlds:
            world.plant(0, "r0c0", S.HOLDING, "odd")
        for _ in range(3):
            assert_same(made.epoch(), plain.epoch())
        reasons = executor_of(made).reasons()
        assert reasons
        assert all(text.startswith(reason) for text in reasons), reasons
        before = captured(made)
        for world in worlds:
            world.hosts[0].remove(world.hosts[0].site_by_name["r0c0"])
        for _ in range(3):
            assert_same(made.epoch(), plain.epoch())
        assert (
            captured(made) == before + 2
        )  # the step and the validation of the env without that seed
        assert executor_of(made).reasons() == reasons
    assert (
        torch.randn(4, device="cuda").isfinite().all()
    )  # torch's own generator draws as before


def test_a_host_without_gradients_trains_and_is_captured() -> None:
    with growing("float images", n=1) as made:
        for parameter in made.hosts[0].host.parameters():
            parameter.requires_grad_(False)
        for _ in range(2):
            made.epoch()
        assert executor_of(made).reasons() == {}
        assert made.hosts[0].gradient_stats.total.device.type == "cuda"


@pytest.mark.finding("M12")
def test_an_error_on_a_stream_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = host_step.train_step

    def train_step(env: HostTraining, *rest: object) -> None:
        if env.index == 1 and env.batch == 2:
            raise ZeroDivisionError("by zero")
        inner(env, *rest)  # type: ignore[arg-type]

    with growing("bytes", n=3, capture=False) as plain:
        plain.trainer.epoch(plain.hosts)
        expected = [
            {name: tensor.cpu() for name, tensor in env.host.state_dict().items()}
            for env in plain.hosts
        ]
    with growing("bytes", n=3) as made:
        with monkeypatch.context() as patch:
            patch.setattr("esper.training.execution.streams.train_step", train_step)
            with pytest.raises(
                HostError, match="env 1, epoch 0, batch 2: ZeroDivisionError: by zero"
            ):
                made.trainer.epoch(made.hosts)
        for index in (0, 2):
            found = {
                name: tensor.cpu()
                for name, tensor in made.hosts[index].host.state_dict().items()
            }
            assert_same([found], [expected[index]])
        assert [env.epoch for env in made.hosts] == [1, 0, 1]
        made.trainer.epoch([made.hosts[1]])  # it continues


def test_float16_is_queued_and_says_why() -> None:
    kind = Kind(KINDS["float images"].task, precision="float16")
    with Growing(kind, StreamExecutor(Gpu(torch.device("cuda"))), 1, "cuda") as made:
        made.reset()
        made.epoch()
        (reason,) = executor_of(made).reasons()
        assert reason.startswith("float16")


def run_config() -> TrainingConfig:
    return TrainingConfig.parse(
        {
            "run": {"rounds": 3, "controller": "random", "seed": 7, "device": "cuda"},
            "task": {"samples_per_epoch": 128, "batch_size": 16},
            "env": {"n_envs": 2, "episode_length": 4, "baseline_episodes": 1},
        }
    )


@pytest.mark.trap(30)
def test_a_run_that_was_stopped_and_resumed_ends_as_if_it_had_not(
    tmp_path: Path,
) -> None:
    """The resumed run captures again what the other one captured long before."""
    Experiment(run_config(), tmp_path / "whole", []).run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("esper.training.execution.streams.WARM_UP", 2)
        sink = Does(within_round(2), stop)
        Experiment(run_config(), tmp_path / "cut", [sink]).run()
        assert sink.did
        Experiment.resume(tmp_path / "cut").run()
    same_run(tmp_path / "cut", tmp_path / "whole")
