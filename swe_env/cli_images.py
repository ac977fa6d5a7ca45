"""`swe-env images`: what this program brought to the disk, and what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from sandboxes.oci_images import ImageStore
from sandboxes.protocol import SandboxError
from sandboxes.registry import PulledImages
from swe_env.display import console
from swe_env.own_images import OwnImage, OwnImages
from swe_env.terminal import guard, run_async, say

images_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, pull, export, pin and remove images: only those that this program brought.",
)
Names = Annotated[list[str], typer.Argument(help="Names of images.")]


@images_app.command("list")
def list_images() -> None:
    """Images that are ours, or that the oci backend knows."""
    console.print(image_table(guard(_own().find)))


@images_app.command()
def pull(
    names: Names,
    mirror: Annotated[str | None, typer.Option(help="Registry that stands in for Docker Hub.")] = None,
) -> None:
    """Pull images that are not here; they are ours from then on."""
    images = PulledImages(say, mirror=mirror)

    async def work() -> None:
        for name in names:
            await images.ensure(name)
            say(f"{name} is here")

    run_async(work)


@images_app.command()
def export(names: Names) -> None:
    """Copy images into the oci backend's store, where they need no Docker."""
    store = ImageStore()
    try:
        for name in names:
            image = guard(lambda name=name: store.export(name))
            say(f"exported {image.name}")
    finally:
        store.unpin()


@images_app.command()
def pin(names: Names) -> None:
    """Keep images from being removed, to make room or by `remove`."""
    for name in names:
        guard(lambda name=name: _own().pin(name, pinned=True))


@images_app.command()
def unpin(names: Names) -> None:
    """Let pinned images be removed again."""
    for name in names:
        guard(lambda name=name: _own().pin(name, pinned=False))


@images_app.command()
def remove(
    names: Annotated[list[str] | None, typer.Argument(help="Names of images of ours.")] = None,
    unused: Annotated[bool, typer.Option("--unused", help="All sealed starts that nobody uses.")] = False,
) -> None:
    """Remove images of ours that are neither pinned nor in use. Exit code 2 if one was refused."""
    if bool(names) == unused:
        typer.echo("swe-env: give names of images, or --unused", err=True)
        raise typer.Exit(2)
    own = _own()
    before = guard(own.size)
    refused = [name for name in names or guard(own.sealed) if not guard(_removal(own, name, unused))]
    console.print(f"{decimal(max(0, before - guard(own.size)))} freed")
    if refused and not unused:
        raise typer.Exit(2)


def image_table(images: list[OwnImage]) -> Table:
    """One row an image."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("image", "what", "where", "size", "last used", "pinned"):
        table.add_column(name, justify="right" if name == "size" else "left", no_wrap=name != "image")
    for image in images:
        table.add_row(
            escape(image.name),
            ", ".join(image.kinds) or "known",
            ", ".join(image.where) or "-",
            decimal(image.size),
            time.strftime("%Y-%m-%d %H:%M", time.localtime(image.used)) if image.used else "-",
            "pinned" if image.pinned else "",
        )
    return table


def _own() -> OwnImages:
    return OwnImages(PulledImages(say), ImageStore())


def _removal(own: OwnImages, name: str, unused: bool) -> Callable[[], bool]:
    """Removes an image; False, and a line that says why, if that is refused."""

    def work() -> bool:
        try:
            own.remove(name)
        except SandboxError as error:
            if unused:
                say(f"kept: {error}")
            else:
                typer.echo(f"swe-env: {error}", err=True)
            return False
        say(f"removed {name}")
        return True

    return work
