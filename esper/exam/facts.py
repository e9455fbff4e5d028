"""Facts of a context that are known before its first step."""

from __future__ import annotations

from esper.agents.advisor import HostFacts
from esper.exam.context import BATCH, RATES, Context
from esper.exam.sources import load_source


def facts_of(context: Context) -> HostFacts:
    """Returns what is known of a context before its first step."""
    source = load_source(context.source)
    width = context.width
    batch = min(BATCH, context.samples)
    return HostFacts(
        widths=(width, 2 * width) if source.images else (width, width),
        parameters={factor: context.parameters(factor) for factor in context.factors},
        operations=context.operations(),
        inputs=source.x[0].size,
        classes=source.classes,
        convolutional=source.images,
        samples=context.samples,
        epochs=context.epochs,
        updates=context.samples // batch * context.epochs,
        rate=RATES[context.topology, context.optimizer] * context.rate,
    )
