"""Frozen option objects as command line flags: one field, one `--flag`, one `BATON_FLAG` environment variable."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer


def flags_of(
    *kinds: type[Any], without: tuple[str, ...] = (), **extra: tuple[type[Any], Any, str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command the flags of option dataclasses.

    The command is called with one keyword argument per flag; `build` makes the objects of them.

    Args:
        kinds: frozen dataclasses whose fields carry `help` metadata and defaults.
        without: field names that are no flags here.
        extra: more flags: name=(type, default, help).
    """
    parameters = []
    for kind in kinds:
        hints = get_type_hints(kind)
        for field in fields(kind):
            if field.name not in without:
                parameters.append(_parameter(field.name, hints[field.name], field.default, field.metadata["help"]))
    parameters += [_parameter(name, *spec) for name, spec in extra.items()]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        arguments = [
            parameter
            for parameter in inspect.signature(command).parameters.values()
            if parameter.kind != parameter.VAR_KEYWORD
        ]

        def with_flags(**values: Any) -> None:
            command(**values)

        with_flags.__name__, with_flags.__doc__ = command.__name__, command.__doc__
        with_flags.__signature__ = inspect.Signature([*arguments, *parameters])  # type: ignore[attr-defined]
        with_flags.__annotations__ = {each.name: each.annotation for each in [*arguments, *parameters]}
        return with_flags

    return decorate


def build(kind: type[Any], values: dict[str, Any]) -> Any:
    """An options object from a command's keyword arguments. Raises ConfigError as the object does."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


def arguments_of(options: Any, without: tuple[str, ...] = ()) -> list[str]:
    """The flags that give another process the same options."""
    arguments = []
    for field in fields(options):
        value = getattr(options, field.name)
        name = field.name.replace("_", "-")
        if field.name in without or value == field.default:
            continue
        arguments += (
            [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
        )
    return arguments


def _parameter(name: str, hint: Any, default: Any, text: str) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    spelled = f"{flag}/--no-{name.replace('_', '-')}" if hint is bool else flag
    option = typer.Option(spelled, envvar=f"BATON_{name.upper()}", help=text)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option])
