"""The env names that a server or pool offers, and functions that build their envs.

Clients can request only names that are registered at startup. The operator of the
server or pool chooses the modules to import; a name that a client sends never causes an
import.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import gymnasium
from gymnasium.envs.registration import EnvSpec, load_env_creator
from gymnasium.error import DependencyNotInstalled

from envserve.envs import user_envs
from envserve.envs.user_envs import is_user_env, split_reference, writable_by_others
from envserve.errors import BAD_ARGUMENT, EnvStartError, UnknownEnv
from envserve.text import did_you_mean, install_command, message_of
from envserve.wrappers.apply import wrap
from envserve.wrappers.specs import WrapperSpec

Env = gymnasium.Env[Any, Any]
Globals = dict[str, Any]

#: Maximum length of an env name that a client can request, in characters.
_MAX_NAME_LENGTH: Final = 200
#: For each package, the envserve extra that installs it.
_EXTRAS: Final = {"ale_py": "atari"} | {x: x for x in ("mujoco", "box2d", "envpool")}
_INSTALL_HINT: Final = (
    "install it, or add it to PYTHONPATH, on the host that runs the envs"
)
#: Packages that never belong to the user's code.
_LIBRARIES: Final = {"", "envserve", "gymnasium", "numpy", *sys.stdlib_module_names}
_KEYWORD_KINDS: Final = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)

#: The env names that each imported module or file has registered.
_names_by_module: Final[dict[str, tuple[str, ...]]] = {}


def offered_names(
    names: Sequence[str] | None = None, import_modules: Iterable[str] = ()
) -> tuple[str, ...]:
    """Import the modules; return the names of the envs on offer, sorted.

    Args:
      names: Names to offer; a reference to a user env (see `user_envs`) offers that
        env, or all envs that its file registers. None offers all registered envs.
      import_modules: Modules or files that register envs when they are imported.

    Raises:
      UnknownEnv: A name is not registered, or a file registers no env.
      EnvStartError: A module cannot be imported.
    """
    import_env_modules(import_modules)
    if names is None:
        _register_installed()
        # Gymnasium registers some names only to explain where an env has moved.
        names = [
            name
            for name, spec in gymnasium.registry.items()
            if len(name) <= _MAX_NAME_LENGTH
            and not getattr(spec.entry_point, "__name__", "").startswith("_raise_")
        ]
    offered: set[str] = set()
    for name in names:
        env_names = import_env_modules([name]) if is_user_env(name) else (name,)
        if not env_names:
            raise UnknownEnv(
                f"{name} registers no env; call gymnasium.register() in it, or "
                f"name a class in it, like {name}:MyEnv"
            )
        offered.update(env_names)
    for name in offered:
        find_spec(name)
    return tuple(sorted(offered))


def import_env_modules(references: Iterable[str]) -> tuple[str, ...]:
    """Import the modules and files named by `references`; return their env names.

    Args:
      references: Modules or files, each optionally followed by a colon and the name of
        an env that it registers, or of a class or function in it; see `user_envs`. They
        must come from the user of this process, never from a peer.

    Returns:
      For each reference, the env that it names, or all envs that its module
      registers.

    Raises:
      EnvStartError: A module or file cannot be imported.
      UnknownEnv: A reference names an env that its module or file does not have.
    """
    names: list[str] = []
    for reference in references:
        module_name, name = split_reference(reference)
        if module_name == "envpool":  # EnvPool's module does not register its envs
            module_name, name = "envserve.envpool", name and f"envpool/{name}"
        known = dict(gymnasium.registry)
        module = _import_module(module_name)
        if module_name not in _names_by_module:
            # Another module may have imported this one already.
            stem = Path(module_name.removesuffix(".py")).name
            _names_by_module[module_name] = tuple(
                key
                for key, spec in gymnasium.registry.items()
                if spec is not known.get(key)  # new or replaced
                or f"{user_envs.module_of(key)}.".startswith(f"{stem}.")
            )
        if name:
            names.append(_register(reference, module, name))
        else:
            names += _names_by_module[module_name]
    return tuple(names)


def _import_module(module: str) -> ModuleType:
    """Import a module or a file `PATH.py`; raise EnvStartError if this fails."""
    user_envs.check_files_exist([module])
    user_envs.modules_being_imported.append(module)
    arguments, sys.argv = sys.argv, [module]  # the module may parse the command line
    pid = os.getpid()
    try:
        return _import_file(module) if module.endswith(".py") else import_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a SystemExit would end this process silently
        frames = [
            f"{frame.filename}:{frame.lineno}"
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename != __file__ and "importlib" not in frame.filename
        ]
        ends = dict.fromkeys([*frames[:1], *frames[-1:]])
        where = f" ({', '.join(ends)})" if ends else ""
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = f"; {_install_command(error) or _INSTALL_HINT}"
        elif module.endswith(".py") and "no known parent package" in message_of(error):
            hint = f"; name the module instead, such as my_package.{Path(module).stem}"
        raise EnvStartError(
            f"expected a module or file with envs; importing {module!r} failed with "
            f"{type(error).__name__}: {message_of(error)}{where}{hint}"
        ) from error
    finally:
        if os.getpid() != pid:  # this is a child process that the module has forked
            os._exit(1)
        sys.argv = arguments
        user_envs.modules_being_imported.pop()


def _import_file(file: str) -> ModuleType:
    """Import a file as a module of the same name; add its folder to `sys.path`."""
    path = Path(os.path.abspath(file))
    folder = str(path.parent)
    if not re.fullmatch(r"[\w-]+", path.stem):
        raise ValueError(
            f"expected a Python file whose name has only letters, digits, _ and -; "
            f"got {path}"
        )
    # Either the standard module or the file would shadow the other one.
    if path.stem in {*sys.stdlib_module_names, "__main__"}:
        raise ValueError(
            "a module of the standard library has the same name; rename your file"
        )
    if writable := writable_by_others(folder) or writable_by_others(str(path)):
        raise ValueError(
            f"other users can write to {writable}; change its mode with chmod go-w, or "
            f"move the file to a folder that only you can write to"
        )
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that its files shadow no other module
    module = import_module(path.stem)
    if not os.path.samefile(module.__file__ or "/", path):
        raise ValueError(
            f"{module.__file__} is a different module with the same name; rename your "
            f"file"
        )
    return module


def _register(reference: str, module: ModuleType, name: str) -> str:
    """Register the env of a reference under its plain name; return the plain name."""
    env_name = user_envs.env_name_of(reference)
    spec = gymnasium.registry.get(name)
    if spec is None:
        creator: Any = module
        for part in name.split("."):
            creator = getattr(creator, part, None)
        if callable(creator):
            spec = EnvSpec(env_name, entry_point=creator)
        elif (spec := registered_spec(name)) is None:
            callables = [key for key, value in vars(module).items() if callable(value)]
            raise UnknownEnv(
                f"expected {module.__name__} to register the env {name!r}, or to "
                f"define a class or function of this name; got neither (if your script "
                f"registers it, pass only {name!r})"
                f"{did_you_mean(name, [*gymnasium.registry, *callables])}"
            )
    gymnasium.registry[env_name] = spec
    return env_name


@functools.cache
def _register_installed() -> None:
    """Register the envs that installed packages offer as entry points.

    An entry point names a class, `NAME = "module:Class"`, or a module that registers
    envs.
    """
    for entry in entry_points(group="envserve.envs"):
        if not entry.attr:
            import_env_modules([entry.module])
        elif entry.name not in gymnasium.registry:
            # A string instead of the class, so that the module is imported only when
            # the env is built.
            entry_point = f"{entry.module}:{entry.attr}"
            gymnasium.registry[entry.name] = EnvSpec(
                entry.name, entry_point=entry_point
            )


def _install_command(error: BaseException) -> str:
    """Return the pip command for a missing package; "" if no extra installs it."""
    words = re.findall(r"\w+", str(error).lower())
    extra = next((_EXTRAS[word] for word in words if word in _EXTRAS), "")
    return extra and f"{install_command(extra)} on the host that runs the envs"


def make_env(
    name: str,
    kwargs: Mapping[str, Any],
    wrappers: Sequence[WrapperSpec] = (),
    env_fn: Callable[[], Env] | None = None,
) -> Env:
    """Build a registered env, or call the function that creates it; apply wrappers.

    Gymnasium's OrderEnforcing and PassiveEnvChecker are omitted: workers always reset
    an env before they step it, and check its values when they write them to the slab.

    Args:
      name: Registered name.
      kwargs: Constructor arguments of the env.
      wrappers: Wrappers to apply, the innermost first.
      env_fn: Function to call instead of building the registered env; the wrappers
        that the function applies are kept.

    Raises:
      UnknownEnv: No env of that name is registered.
      WrapperError: A wrapper is not registered, or one of its arguments is wrong.
      EnvStartError: A wrapper does not accept this env, the constructor does not take
        these arguments, a package is missing, or the env exists only as a vector env.
    """
    if env_fn is not None:
        return wrap(_call(env_fn, name), wrappers)
    spec = copy.copy(find_spec(name))
    spec.order_enforce = False
    if spec.entry_point is None:
        raise EnvStartError(
            f"{name} exists only as a vector env; pass vectorized=True, or start the "
            f"server with --vector {name}"
        )
    try:
        # The id of a class or function that is not registered contains a colon.
        if ":" in spec.id and not _can_be_registered(spec.entry_point):
            limit = kwargs.get("max_episode_steps") or -1  # None is the default
            kwargs = {k: v for k, v in kwargs.items() if k != "max_episode_steps"}
            env = _call(functools.partial(env_creator_of(spec), **kwargs), name)
            env = gymnasium.wrappers.TimeLimit(env, limit) if limit > 0 else env
        else:
            # As in Gymnasium, the arguments may contain `disable_env_checker`.
            env = gymnasium.make(spec, **{**kwargs, "disable_env_checker": True})
    except DependencyNotInstalled as error:
        if not (install := _install_command(error)):
            raise
        raise EnvStartError(f"{name} needs a missing package: {install}") from None
    except TypeError as error:
        _raise_for_arguments(error, spec, kwargs)
        raise
    return wrap(env, wrappers)


def _call(create: Callable[[], Env], name: str) -> Env:
    """Return the env that a function creates; reject other values and vector envs."""
    env = create()
    if isinstance(env, type) or not hasattr(env, "step"):
        hint = "call it" if callable(env) else "does the function lack a return?"
        raise EnvStartError(
            f"expected {name} to return an env; got {env!r:.200}; {hint}"
        )
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise EnvStartError(
            f"expected {name} to return a single env; got the vector env {env!r:.200}; "
            f"return one of its envs, or register it as a vector_entry_point"
        )
    return env


def _can_be_registered(entry_point: object) -> bool:
    """Return whether `gymnasium.make` can create all envs of an entry point.

    `gymnasium.make` sets the `spec` of an env, and accepts only instances of
    `gymnasium.Env`. For a function, the result is False, because it is not known in
    advance which envs the function creates.
    """
    if isinstance(entry_point, str | None):
        return True
    if not (isinstance(entry_point, type) and issubclass(entry_point, gymnasium.Env)):
        return False
    is_property = hasattr(inspect.getattr_static(entry_point, "spec"), "__get__")
    return not is_property and entry_point.__setattr__ is object.__setattr__


def _raise_for_arguments(
    error: TypeError, spec: EnvSpec, kwargs: Mapping[str, Any]
) -> None:
    """Raise EnvStartError if a constructor argument is missing or unexpected."""
    creator = env_creator_of(spec)
    accepted = arguments_of(creator)
    classes = getattr(creator, "__mro__", ())
    names = {f"{cls.__qualname__}.__init__" for cls in classes}
    # Without an `__init__`, the message contains only the name of the class.
    names.add(getattr(creator, "__name__" if names else "__qualname__", ""))
    match = BAD_ARGUMENT.search(str(error))
    if match and (
        match[1] in names or (match[2] in kwargs and match[2] not in accepted)
    ):
        text = str(error.__cause__ or error)
        if text.endswith("takes no arguments"):  # does not name the argument
            text += f", got {', '.join(kwargs)}"
        raise EnvStartError(
            f"env_kwargs: {text}; {spec.id} takes "
            f"{', '.join(sorted(accepted)) or 'none'}"
        ) from None


def arguments_of(creator: Callable[..., Any]) -> set[str]:
    """Return the keyword arguments of a function, or of the constructor of a class.

    A constructor with `**kwargs` also accepts the arguments of the class's bases.
    """
    names: set[str] = set()
    for init in [cls.__init__ for cls in getattr(creator, "__mro__", ())] or [creator]:
        parameters = (parameters_of(init) or {}).values()
        names |= {p.name for p in parameters if p.kind in _KEYWORD_KINDS}
        if all(p.kind is not Parameter.VAR_KEYWORD for p in parameters):
            break
    return names - {"self"}


def env_creator_of(spec: EnvSpec) -> Any:
    """Return the class or function that creates a registered env.

    Returns None if the env exists only as a vector env.
    """
    entry = spec.entry_point
    return load_env_creator(entry) if isinstance(entry, str) else entry


def parameters_of(function: Callable[..., Any]) -> Mapping[str, Parameter] | None:
    """Return the parameters of a function; None if it is native code without them."""
    try:
        return signature(function).parameters
    except ValueError:
        return None


def user_modules(env_name: str) -> tuple[dict[str, Globals], dict[str, Globals]]:
    """Return two dicts from names of the user's loaded modules to their globals.

    The first dict contains the modules that `import_env_modules` has imported, the
    module that defines the env, and the modules of their packages. The second one
    contains all other modules except installed ones.
    """
    names = {Path(item.removesuffix(".py")).name for item in _names_by_module}
    names.add(user_envs.module_of(env_name))
    packages = {item.partition(".")[0] for item in names} - _LIBRARIES
    env_modules, others = dict[str, Globals](), dict[str, Globals]()
    for name, module in sys.modules.copy().items():
        package, file = name.partition(".")[0], user_envs.file_of(module)
        is_installed = not file or "-packages/" in file or package in _LIBRARIES
        if package in packages:
            env_modules[name] = user_envs.globals_of(module)
        elif not is_installed:
            others[name] = user_envs.globals_of(module)
    return env_modules, others


def preload(name: str) -> None:
    """Import the module of an env's class, so that forks of this process share it."""
    registered = gymnasium.registry.get(name)
    if registered is not None and isinstance(registered.entry_point, str):
        _import_module(registered.entry_point.partition(":")[0])


def registered_spec(name: str) -> EnvSpec | None:
    """Return the spec of a registered env; None if there is none.

    If the name has no version, return the spec of the latest version.
    """
    spec = gymnasium.registry.get(name)
    versions = [
        item
        for item in gymnasium.registry.values()
        if item.version is not None and item.id == f"{name}-v{item.version}"
    ]
    if spec is None and versions:
        spec = max(versions, key=lambda item: item.version or 0)
        gymnasium.logger.warn(f"using the latest version of {name}, which is {spec.id}")
    return spec


def find_spec(name: str) -> EnvSpec:
    """Return Gymnasium's spec of a registered env.

    Raises:
      UnknownEnv: No env of that name is registered; the message suggests names.
    """
    if name not in gymnasium.registry:
        _register_installed()
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    module, attribute = user_envs.split_reference(name)
    # `ppo` names the module of a file that it has loaded like "/path/file_py".
    if attribute and "/" in module and not module.endswith((".py", "_py")):
        raise UnknownEnv(
            f"expected a file or a module before the colon; got {name!r}; pass "
            f"{module}.py:{attribute}, or the name of the module as in an import"
        )
    if not user_envs.is_importable(name):
        raise UnknownEnv(
            f"expected an env that can be imported; got {name!r}, which is defined in "
            f"a script. Only workers that the script starts can create this env; to "
            f"replay its crashes, move it to a separate file"
        )
    hint = did_you_mean(name, gymnasium.registry)
    if not hint and (name.startswith("ALE/") or "NoFrameskip" in name):
        hint = "; Atari games need --import ale_py (import_modules=['ale_py'])"
    if not hint and _names_by_module:
        hint = "".join(
            f"; {module} registers {', '.join(names[:5]) or 'no env'}"
            for module, names in _names_by_module.items()
        )
    hint = hint or (
        "; name a user env with its file or module, like my_env.py:MyEnv or "
        "my_package.envs:MyEnv, or import the module that registers it with --import "
        "(import_modules)"
    )
    raise UnknownEnv(f"no env named {name!r} is registered{hint}")
