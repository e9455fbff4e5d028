"""Any file or option is accepted, refused with a ConfigError, or read with a warning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from esper.agents.script import SCHEDULES, encode, read_schedule
from esper.config import ConfigError, TrainingConfig, read_toml, set_dotted
from esper.core.action import ActionSpec
from esper.core.stage import SeedStage
from esper.data.task import resolve
from esper.data.tasks import load_task
from esper.files.grown_host import committed_network, export, load_host
from esper.show.charts import Picture
from esper.show.live import short_form
from esper.show.page import report_html
from esper.show.read import open_run
from esper.training.host_training import HostTraining
from esper.training.metrics import make_metrics
from tests.core_helpers import plant, tiny_config
from tests.recorded import Recorded

quick = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
few = settings(quick, max_examples=5)
SECTIONS = {
    name: tuple(field.annotation.model_fields)
    for name, field in TrainingConfig.model_fields.items()
}  # type: ignore[union-attr]
NAMES = sorted(
    {
        *SECTIONS,
        *(name for names in SECTIONS.values() for name in names),
        "gates",
        "level",
    }
)


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 100),
    st.sampled_from([2**31, 2**63, 10**20, 10**400, -1]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        [
            "plateau",
            "divergence",
            "G1",
            "shaped",
            "ppo",
            "auto",
            "cosine",
            "conv_light",
            "nan",
            "\x00",
        ]
    ),
)


junk = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


known = st.sampled_from(sorted(SECTIONS)).flatmap(
    lambda section: st.tuples(
        st.just(section),
        st.dictionaries(
            st.sampled_from(SECTIONS[section]), junk, min_size=1, max_size=3
        ),
    )
)


configs = st.lists(known, max_size=3).map(dict) | st.dictionaries(
    st.sampled_from(NAMES) | st.text(max_size=5), junk
)


def refusal(work: Callable[[], Any]) -> str:
    """The text of a ConfigError, empty without an error; any other error fails the test."""
    try:
        work()
    except ConfigError as error:
        return str(error)
    return ""


def parse(tables: Any) -> None:
    assert len(refusal(lambda: TrainingConfig.parse(tables))) < 5_000


@settings(quick, max_examples=30)
@given(tables=configs)
def test_a_config_is_one_or_is_refused(tables: Any, tmp_path: Path) -> None:
    parse(tables)
    if not refusal(lambda: TrainingConfig.parse(tables)):
        config = TrainingConfig.parse(tables)
        (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        assert TrainingConfig.parse(read_toml(tmp_path / "config.toml")) == config


def mutated(content: bytes) -> st.SearchStrategy[bytes]:
    """``content`` with pieces cut out, put in, doubled or changed."""
    place = st.integers(0, len(content))
    pieces = st.binary(max_size=12) | st.sampled_from(
        [b"[[", b'"', b"\n", b"= {", b"1e999", b"\xff"]
    )

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        found = content
        for one, other, piece in edits:
            first, last = sorted((one, other))
            found = (
                found[:first]
                + piece
                + (found[last:] if last - first < 40 else found[first:])
            )
        return found

    return st.lists(st.tuples(place, place, pieces), min_size=1, max_size=4).map(apply)


@quick
@given(content=mutated(TrainingConfig().to_toml().encode()) | st.binary(max_size=60))
def test_a_config_file_is_one_or_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    said = refusal(lambda: read_toml(file))
    assert not said or "config.toml cannot be read as TOML" in said
    if not said:
        parse(read_toml(file))


@pytest.mark.parametrize(
    "content",
    [
        "a = " + "[" * 20_000,
        "a = " + "9" * 5000,
        "\x00",
    ],
)
def test_numbers_and_nests_that_no_reader_takes(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(f"[run]\n{content}\n")
    said = refusal(lambda: TrainingConfig.parse(read_toml(tmp_path / "config.toml")))
    assert 0 < len(said) < 5_000
    name, _, value = content.partition(" = ")
    said = refusal(lambda: TrainingConfig.parse(assigned(f"run.{name}={value}")))
    assert 0 < len(said) < 5_000


def assigned(*many: str) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    for one in many:
        set_dotted(tables, one)
    return tables


names = st.sampled_from(NAMES) | st.text(max_size=4)
values = (
    st.text(max_size=12)
    | junk.map(repr)
    | st.sampled_from(["[", "{a=1}", "1979-05-27", "0x" + "f" * 9999])
)


assignments = st.text(max_size=20) | st.builds(
    lambda path, value: f"{'.'.join(path)}={value}", st.lists(names, max_size=4), values
)


@settings(quick, max_examples=50)
@given(many=st.lists(assignments, max_size=4))
def test_assignments_are_taken_or_refused(many: list[str]) -> None:
    said = refusal(lambda: assigned(*many))
    assert not said or "--set" in said
    if not said:
        parse(assigned(*many))


SPEC = ActionSpec(("r0c0", "r0c1"), ("conv_light", "norm"))


@settings(quick, max_examples=30)
@given(content=mutated((SCHEDULES / "digits.toml").read_bytes()))
def test_a_schedule_is_one_or_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    file.write_bytes(content)
    said = refusal(lambda: [encode(entry, SPEC) for entry in read_schedule(file)])
    assert not said or "schedule" in said or "s.toml" in said


@pytest.fixture
def run(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recorded run, whose charts are made and not drawn."""
    empty = Picture(b"", "")
    for module in ("charts", "life"):
        monkeypatch.setattr(f"esper.show.{module}.picture", lambda *_: empty)
    return recorded.grown


Edit = Callable[[list[dict[str, Any]]], None]
places = st.integers(0, 10_000)


@st.composite
def edits(draw: st.DrawFn) -> Edit:
    """A change of some lines of a log: a field with another value or none, a line doubled, moved or left out."""
    kinds = st.sampled_from(["value", "drop", "double", "move"])
    changes = draw(st.lists(st.tuples(places, places, kinds, junk), max_size=8))

    def apply(lines: list[dict[str, Any]]) -> None:
        for line, field, what, value in changes:
            at = line % len(lines)
            if what == "value" and lines[at]:
                name = sorted(lines[at])[field % len(lines[at])]
                lines[at] = {**lines[at], name: value}
            elif what == "drop" and len(lines) > 1:
                del lines[at]
            elif what == "double":
                lines.insert(at, dict(lines[at]))
            else:
                lines.append(lines.pop(at))

    return apply


def shown(folder: Path) -> None:
    """The output of `esper show` and `esper report` for a folder."""
    found = open_run(folder)
    assert short_form(found)
    page = report_html([found])
    assert page.lower().startswith("<!doctype html>")
    assert "<script" not in page


def copied(run: Path, there: Path) -> Path:
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(run, there)
    return there


@few
@given(edit=edits())
def test_a_damaged_log_is_shown_as_far_as_it_is_readable(
    edit: Edit, run: Path, tmp_path: Path
) -> None:
    folder = copied(run, tmp_path / "r")
    log = folder / "events.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    edit(lines)
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown(folder)


@few
@given(data=st.data())
def test_files_that_were_damaged_are_shown_as_far_as_they_go(
    data: st.DataObject, run: Path, tmp_path: Path
) -> None:
    folder = copied(run, tmp_path / "r")
    for name in ("events.jsonl", "config.toml", "env.json"):
        file = folder / name
        if data.draw(st.booleans(), label=name):
            file.write_bytes(data.draw(mutated(file.read_bytes()[:3000])))
        elif data.draw(st.integers(0, 4)) == 0:
            file.unlink()
    said = refusal(lambda: shown(folder))
    assert not said or "is not a run folder" in said


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A host of digits that was saved with a fossil."""
    task = load_task("digits")
    config = resolve(tiny_config(), task)
    training = HostTraining(0, task, config, make_metrics(1, torch.device("cpu"))[0])
    training.reset(0, 0)
    plant(training, "r0c0", "conv_light", stage=SeedStage.FOSSILIZED)
    stem = tmp_path_factory.mktemp("hosts") / "host"
    export(committed_network(training), stem, {"seed": 1})
    load_host(stem)
    return stem


def loaded(stem: Path) -> None:
    said = refusal(lambda: load_host(stem))
    if said:
        assert stem.name in said
        return
    assert all(
        bool(torch.isfinite(tensor.float()).all())
        for tensor in load_host(stem).state_dict().values()
    )


@quick
@given(data=st.data())
def test_a_host_that_was_damaged_is_loaded_or_refused(
    data: st.DataObject, host: Path, tmp_path: Path
) -> None:
    stem = tmp_path / "host"
    for ending in (".json", ".safetensors"):
        content = host.with_name(host.name + ending).read_bytes()
        if data.draw(st.booleans(), label=ending):
            content = data.draw(mutated(content))
        stem.with_name(stem.name + ending).write_bytes(content)
    loaded(stem)


@settings(quick, max_examples=50)
@given(
    path=st.lists(places, min_size=1, max_size=3),
    value=junk | st.sampled_from([30_000, 1e30, "\ud800", "mine.py:f", "attention"]),
)
def test_a_topology_that_was_changed_is_loaded_or_refused(
    path: list[int], value: Any, host: Path, tmp_path: Path
) -> None:
    """Any value, at any depth, is replaced: a width of millions, an unknown name, nested lists."""
    stem = tmp_path / "host"
    shutil.copy(host.with_name("host.safetensors"), stem.with_name("host.safetensors"))
    facts = json.loads(host.with_name("host.json").read_text())
    table = facts
    for place in path[:-1]:
        inner = [key for key in table if isinstance(table[key], dict) and table[key]]
        table = table[inner[place % len(inner)]] if inner else table
    table[sorted(table)[path[-1] % len(table)]] = value
    stem.with_name("host.json").write_text(json.dumps(facts))
    loaded(stem)


def test_a_width_that_no_memory_holds_is_refused_by_the_size_of_the_weights(
    host: Path, tmp_path: Path
) -> None:
    stem = tmp_path / "host"
    shutil.copy(host.with_name("host.safetensors"), stem.with_name("host.safetensors"))
    facts = json.loads(host.with_name("host.json").read_text())
    facts["sites"] = dict.fromkeys(facts["sites"], 10**6)
    stem.with_name("host.json").write_text(json.dumps(facts))
    assert "larger than the file of weights" in refusal(lambda: load_host(stem))
