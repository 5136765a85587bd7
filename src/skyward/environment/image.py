"""``Image``: what users write as a node's environment, with what this process can tell of it."""

from __future__ import annotations

from collections.abc import Sequence

from skyward.request.checks import texts, whole_number
from skyward.request.image import ImageSettings


class Image(ImageSettings):
    """A node's environment. Lists are taken and kept as tuples; the repr masks ``env`` and credentials in URLs.

    Attributes:
        python: version such as ``"3.11"``; None means the client's minor version, the only one a pool accepts.
        mirrors: parameter ``mirror``: True if nodes also get the distributions that the program imports, in the
            versions installed here; :func:`dataclasses.replace` passes it as ``mirrors``. :meth:`mirror` returns an
            image with a choice of them instead.
        pip: requirements in pip's notation, without Skyward: nodes get the code that runs here. They are added to the
            mirrored distributions as ``pip install`` would here: a version that fits stays, another one is replaced.
        pip_extra_index_url: a further package index.
        apt: Debian packages.
        env: environment variables of every worker, set before user code.
        includes: local files and folders, each put into the workers' current folder under its own name, and imported
            from there. A pool reads them when it opens, without repositories' own files, environments, caches, and what
            git ignores; a path that is named itself is sent.
        pip_index_url: the package index instead of the default one. A ``file:`` URL means the node's files.
        find_links: places with wheels, first one first. A folder that exists here is sent to the nodes, its wheels
            only; URLs, and absolute paths that do not exist here, mean the node's own.
        outputs: patterns of files in the working folder of calls, such as ``"*.bin"`` or ``"models/"``; they are
            fetched before a node ends, into ``outputs/<pool id>/<node>/`` here.

    Raises:
        ConfigurationError: a parameter has the wrong type or form, or an index URL carries credentials.
    """

    __slots__ = ("_table",)

    def __repr__(self) -> str:
        return getattr(self, "_table", "") or super().__repr__()

    @classmethod
    def mirror(cls, only: Sequence[str] | None = None, exclude: Sequence[str] = ()) -> Image:
        """Return an image with the distributions of this environment, in their versions. Blocks.

        Distributions from a package index are installed from that index; editable and local ones are built here as
        wheels, cached, and sent. Build labels such as ``+cpu`` are dropped, so each node gets the build for its own
        hardware. Skyward's requirements and tools such as pip are omitted. The repr is a table of every distribution.
        A pool adds nothing else from this environment to such an image.

        Args:
            only: names of distributions to take, with their requirements; None takes all.
            exclude: names of distributions to leave out, with everything that requires them.

        Raises:
            ConfigurationError: a name is not installed, an index lacks a distribution, two contradict each other, or a
                wheel cannot be built here or is for another system.
        """
        from skyward.environment.image_mirror import mirror_environment

        names = None if only is None else texts("only", only)
        mirror = mirror_environment(only=names, exclude=texts("exclude", exclude))
        image = mirror.added_to(cls(mirror=False))
        object.__setattr__(image, "_table", mirror.table())
        return image

    def content_hash(self, *, pins: Sequence[str] | None = None) -> str:
        """Return 12 hexadecimal characters that name the installed environment: Python, packages, indexes, engine pins.

        The order of ``pip`` and ``apt`` does not matter, that of ``find_links`` does. ``env`` and ``includes`` install
        nothing, so they do not count.

        Args:
            pins: versions of the engine's packages; None means those of this process.
        """
        from skyward.environment.bootstrap import content_hash
        from skyward.environment.skyward_wheel import engine_pins

        return content_hash(self, pins=engine_pins() if pins is None else pins)

    def bootstrap(self, ttl: int = 0) -> str:
        """Return the POSIX-sh script that prepares a machine; running it again changes nothing.

        It holds no value of ``env``: those travel in a separate file.

        Args:
            ttl: seconds until the machine shuts itself down, armed before anything else; 0 arms nothing.
        """
        from skyward.environment.bootstrap import DEFAULT_ROOT, render_bootstrap
        from skyward.environment.skyward_wheel import engine_pins, own_wheel

        ttl_s = whole_number("ttl", ttl, minimum=0)
        return render_bootstrap(
            self, root=DEFAULT_ROOT, engine_pins=engine_pins(), code=own_wheel().digest, ttl_s=ttl_s
        )
