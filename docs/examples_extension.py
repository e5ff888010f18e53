"""For the site: the `Example:` of a docstring is shown as code."""

import re

import griffe


class ExampleSections(griffe.Extension):
    """Reads `Example:` as the section that griffe calls `Examples:`."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Renames the section in the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
