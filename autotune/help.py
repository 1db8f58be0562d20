"""The help of the commands in groups, in plain text that fits 80 columns."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from .options import GROUPS

#: The groups of the commands.
COMMANDS = {
    "Tune": ("tune", "worker", "run"),
    "Inspect": ("devices", "profile", "tiles"),
    "Output": ("show", "report", "compare"),
}


class GroupedCommand(TyperCommand):
    """A command whose options stand in the groups of ``options.GROUPS``; what has none there is in the last."""

    # Any: click's classes, which some releases of typer take from click and others hold themselves.
    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the groups that have an option."""
        rows = {parameter.name: parameter.get_help_record(ctx) for parameter in self.get_params(ctx)}
        named = {name for names in GROUPS.values() for name in names}
        *_, last = GROUPS
        for group, names in GROUPS.items():
            rest = [name for name in rows if name not in named] if group == last else []
            found = [row for name in (*names, *rest) if (row := rows.get(name)) is not None]
            if found:
                with formatter.section(group):
                    formatter.write_dl(found)


class GroupedCommands(TyperGroup):
    """Commands in the groups of ``COMMANDS``."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the groups."""
        limit = formatter.width - 6 - max(len(name) for name in self.commands)
        for group, names in COMMANDS.items():
            with formatter.section(group):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])
