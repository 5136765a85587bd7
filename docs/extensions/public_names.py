"""Links to the reference: from the names in signatures and docstrings, and from inline code of the pages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.inspect import TypeAliasForwardRef
from sphinx.util.nodes import make_refnode

from extensions.code_names import candidates, command, documented

COMMANDS_PAGE = "reference/command-line"


class CodeLinks(SphinxPostTransform):
    """Inline code that is a public name, or a command, links to its entry in the reference."""

    default_priority = 5

    def run(self, **_: Any) -> None:
        """Replace the inline code of one page, except in titles, links and signatures."""
        domain = self.env.domains.python_domain
        for node in list(self.document.findall(nodes.literal)):
            if any(isinstance(each, nodes.title | nodes.reference | addnodes.pending_xref) for each in parents(node)):
                continue
            if (anchor := command(node.astext())) is not None:
                uri = self.app.builder.get_relative_uri(self.env.docname, COMMANDS_PAGE)
                node.replace_self(nodes.reference("", "", node.deepcopy(), refuri=f"{uri}#{anchor}", internal=True))
            elif (name := documented(node.astext(), domain.objects)) is not None:
                found = domain.objects[name]
                link = (self.app.builder, self.env.docname, found.docname, found.node_id, node.deepcopy(), name)
                node.replace_self(make_refnode(*link))


def parents(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield the nodes around ``node``, innermost first."""
    while (node := node.parent) is not None:
        yield node


def resolve(app: Sphinx, env: BuildEnvironment, node: nodes.Element, text: nodes.Element) -> nodes.Element | None:
    """Return a link for a name by its defining module: to the reference, or to Python's documentation."""
    if node.get("refdomain") != "py":
        return None
    objects = env.domains.python_domain.objects
    target = ".".join(part for part in node["reftarget"].lstrip("_").split(".") if not part.startswith("_"))
    names = list(candidates(target))
    if node["reftype"] in ("attr", "meth"):  # of a class: fields and inherited methods have no entries of their own
        owner = target.rpartition(".")[0] or node.get("py:class") or ""
        names += [*candidates(owner), f"{node.get('py:module')}.{owner}"]
    if (name := next((each for each in names if each in objects), None)) is not None:
        found = objects[name]
        return make_refnode(app.builder, node["refdoc"], found.docname, found.node_id, text, name)
    if target.partition(".")[0] in sys.stdlib_module_names:
        module = target if node["reftype"] == "mod" else target.rpartition(".")[0]
        anchor = f"module-{target}" if node["reftype"] == "mod" else target
        return nodes.reference("", "", text, refuri=f"https://docs.python.org/3/library/{module}.html#{anchor}")
    return None


def keep_colons(_: Sphinx, what: str, *source: Any) -> None:
    """Begin docstrings of properties and variables with a comment: napoleon takes text before a colon for a type."""
    if what in ("attribute", "data", "property"):
        source[-1][:0] = ["..", ""]


def plain_parameters(*signature: Any) -> tuple[str, str | None] | None:
    """Leave out private parameters, and write ``...`` for defaults that a factory makes: ``<factory>`` is no code."""
    *_, arguments, returns = signature
    if not arguments or not re.search(r"<factory>|, _\w+:", arguments):
        return None
    return re.sub(r", _\w+: [^=]+ = \w+", "", arguments.replace("<factory>", "...")), returns


def fewer_overloads(_: Sphinx, __: str, ___: str, content: nodes.Element) -> None:
    """Remove overloads that count arguments, with type variables such as ``R2``: they are for type checkers."""
    for signature in list(content.parent.findall(addnodes.desc_signature)):
        if re.search(r"\b[RT][1-9]", signature.astext()) and not signature["ids"]:
            content.parent.remove(signature)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the links."""
    app.setup_extension("sphinx.ext.napoleon")
    app.add_post_transform(CodeLinks)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
    app.connect("autodoc-process-signature", plain_parameters)
    app.connect("object-description-transform", fewer_overloads)
    TypeAliasForwardRef.__repr__ = lambda alias: alias.name  # the text in a signature, if it stands inside Callable
    for each in PyObject.doc_field_types:
        each.label = "Attributes" if each.name == "variable" else each.label
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
