"""Style of all charts, on screen and on paper: colours for colour-blind readers, markers, and charts as inline SVG."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#882255", "#999933", "#44aa99", "#332288",
)  # fmt: skip
"""Okabe and Ito's colours without yellow and black, followed by four of Paul Tol's."""
MARKERS = "osD^vP*X<>"
REFERENCE = "#555555"
"""Colour of what runs are compared with."""
SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"


@contextmanager
def chart_style() -> Iterator[None]:
    """Applies the style to matplotlib figures made and saved inside the context, or in a decorated function."""
    import matplotlib  # slow to import, and only charts need it
    from cycler import cycler

    settings: Any = {
        "axes.prop_cycle": cycler(color=PALETTE),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#777777",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.labelsize": 9,
        "grid.color": "#e3e3e3",
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "legend.fontsize": 9,
        "legend.frameon": False,
        "text.parse_math": False,  # names may contain dollar signs
        "svg.fonttype": "none",
        "svg.hashsalt": "esper",
    }
    with matplotlib.rc_context(settings):
        yield


def inline_svg(figure: Figure, title: str, description: str) -> str:
    """Returns the figure as an svg element for an HTML page, the same for the same figure.

    Ids are unique among figures with different titles or contents. Screen readers read the title and the description.
    """
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # names may contain characters that the font lacks; browsers have others
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Type", "Format", "Creator")))
    svg = file.getvalue()
    root = ElementTree.fromstring(svg)
    root.remove(root[0])  # matplotlib's style, which would apply to the whole page
    digest = hashlib.sha256(f"{title}\0{description}\0{svg}".encode())
    prefix = "c" + digest.hexdigest()[:10]
    for element in root.iter():
        if element.tag == f"{{{SVG}}}g":  # nothing refers to groups
            element.attrib.pop("id", None)
        # The prefix goes in front of an id, and behind the # of a reference to one.
        for name in {"id", "clip-path", f"{{{XLINK}}}href"} & element.attrib.keys():
            reference = re.sub(r"^(url\(#|#|)", rf"\g<1>{prefix}-", element.attrib[name])
            element.set(name, reference)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-title {prefix}-description")
    root.insert(0, _text("title", f"{prefix}-title", title))
    root.insert(1, _text("desc", f"{prefix}-description", description))
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def _text(tag: str, name: str, words: str) -> ElementTree.Element:
    element = ElementTree.Element(f"{{{SVG}}}{tag}", id=name)
    element.text = words
    return element
