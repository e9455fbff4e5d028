"""Style of all charts, on screen and on paper: colours for colour-blind readers, markers, and charts as inline SVG."""

from __future__ import annotations

import hashlib
import io
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
STAGE_COLORS = {
    "GERMINATED": "#f0e442", "TRAINING": "#56b4e9", "BLENDING": "#e69f00", "HOLDING": "#cc79a7",
    "FOSSILIZED": "#40b58f", "PRUNED": "#d55e00", "EMBARGOED": "#bbbbbb", "RESETTING": "#e2e2e2",
}  # fmt: skip
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


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
        "legend.fontsize": 8.5,
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
        figure.savefig(file, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for parent in (root, *root.findall(f"{{{SVG}}}defs")):
        for element in list(parent):
            if element.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):  # the style would apply to the whole page
                parent.remove(element)
    prefix = "c" + hashlib.sha256(f"{title}\0{description}\0{file.getvalue()}".encode()).hexdigest()[:10]
    _rename_ids(root, prefix)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-title {prefix}-description")
    for place, (tag, words) in enumerate((("title", title), ("desc", description))):
        element = ElementTree.Element(f"{{{SVG}}}{tag}", id=f"{prefix}-{'title' if tag == 'title' else 'description'}")
        element.text = words
        root.insert(place, element)
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    return ElementTree.tostring(root, encoding="unicode")


def _rename_ids(root: ElementTree.Element, prefix: str) -> None:
    """Puts ``prefix`` in front of every id that is referred to, and removes the others."""
    used = set()
    for element in root.iter():
        for name, value in element.attrib.items():
            if name == f"{{{XLINK}}}href" and value.startswith("#"):
                used.add(value[1:])
                element.set(name, f"#{prefix}-{value[1:]}")
            elif name == "clip-path":
                used.add(value[5:-1])  # url(#...)
                element.set(name, f"url(#{prefix}-{value[5:-1]})")
    for element in root.iter():
        identity = element.attrib.pop("id", None)
        if identity in used:
            element.set("id", f"{prefix}-{identity}")
