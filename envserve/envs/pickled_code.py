"""Code of the user's process that the workers of the same host cannot import.

A script may define env classes, register envs, and pass functions that create envs, as
for Gymnasium's `AsyncVectorEnv`. The client pickles this code with cloudpickle, and the
pool sends it to each of its workers in a BUILD message, over the worker's socket pair.
No message on the network has a field for pickled code, and neither has `EnvRequest`, so
a server never passes pickled code to its workers.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import re
import sys
import warnings
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import CodeType, ModuleType
from typing import Any, ClassVar, Final, NoReturn, Self

import gymnasium
from gymnasium.envs.registration import EnvSpec, WrapperSpec, load_env_creator

from envserve.envs import user_envs
from envserve.envs.registry import registered_spec
from envserve.errors import EnvStartError, WrapperError
from envserve.spaces import codec
from envserve.wrappers.registry import WRAPPERS, RegisteredWrapper
from envserve.wrappers.specs import table_of

Env = gymnasium.Env[Any, Any]

#: Vector entry points that `envserve.gym` has replaced in this process, by env name.
replaced_entry_points: Final[dict[str, Any]] = {}
#: Maximum size of the pickled code of the requested envs, and of all code; a message to
#: a worker may have up to 64 MiB.
_MAX_BYTES: Final = 32 << 20
_MAX_TOTAL_BYTES: Final = 60 << 20


@dataclass(frozen=True)
class UserCode:
    """The code that workers need in addition to the modules that they import.

    Attributes:
      specs: Maps env names to the specs to register in each worker. They include all
        envs that this process has registered, because an env or function may create any
        of them.
      separate: Maps the names of the specs with code, except that of the requested env,
        to pickles of the spec and its part of `main`. They are used if not all specs
        can be unpickled together.
      env_fns: One function per row, which creates the env of the row; empty if the envs
        are created by name.
      wrappers: Maps names to the classes and functions to register as wrappers in each
        worker.
      kwargs: Arguments of the env's constructor that have to be pickled: one dict for
        all envs, or one for each env.
      main: Maps each NAME that a spec contains as "__main__:NAME" to the object with
        this name in the script.
      copies: The functions that `copy_env_fn` has returned.
    """

    specs: dict[str, EnvSpec] = field(default_factory=dict)
    separate: dict[str, bytes] = field(default_factory=dict)
    env_fns: Sequence[Callable[[], Env]] = ()
    wrappers: dict[str, Callable[..., Env]] = field(default_factory=dict)
    kwargs: list[dict[str, Any]] = field(default_factory=list)
    main: dict[str, Any] = field(default_factory=dict)
    copies: list[Callable[[], Env]] = field(default_factory=list)

    @classmethod
    def of(cls, env: object) -> tuple[Any, Self]:
        """Return the argument `env` for `name_and_imports`, and the code of the env.

        Args:
          env: See `BatchEnv.local`.

        Raises:
          TypeError: An element of a list is not a function.
          ValueError: The list is empty.
        """
        _pickle_loaded_files_by_value()
        # Gymnasium's own specs are omitted, because every worker has them.
        specs, separate = dict[str, EnvSpec](), dict[str, bytes]()
        for name, registered in gymnasium.registry.items():
            package = user_envs.module_of(name).partition(".")[0]
            if package != "gymnasium" or name not in _names_in_gymnasium():
                original = _original(registered)
                if _has_code(original):
                    try:
                        pair = _pickle((original, _main_objects(original)))
                    except Exception:  # it cannot be pickled
                        continue
                    separate[name] = pair
                specs[name] = original
        env_fns: Sequence[Callable[[], Env]] = ()
        reference: Any = env
        if isinstance(env, str) and (spec := registered_spec(env)):
            reference, specs[spec.id] = spec.id, _original(spec)
        elif isinstance(env, EnvSpec):
            reference, specs[env.id] = env.id, _original(env)
        elif isinstance(env, Sequence) and not isinstance(env, str):
            if not env:
                raise ValueError(
                    "env: expected at least one function; got an empty list"
                )
            for index, function in enumerate(env):
                if not callable(function):
                    raise TypeError(
                        f"env[{index}]: expected a function that creates an env; got "
                        f"{function!r:.200}; for several envs of one name, pass the "
                        f"name and num_envs={len(env)}"
                    )
            env_fns = env
            names = [*dict.fromkeys(map(user_envs.name_of_code, env))]
            reference = (names[0] if len(names) == 1 else f"{names[0]}(...)")[:200]
        elif callable(env):
            reference = user_envs.name_of_code(env)[:200]
            specs[reference] = EnvSpec(re.sub(r"[^\w:.]", "", reference), env)
        if isinstance(reference, str):
            separate.pop(reference, None)
        return reference, cls(specs, separate, env_fns)

    def take_kwargs(self, kwargs: Any) -> Any:
        """Store the arguments that have to be pickled; return the others."""
        if isinstance(kwargs, list | tuple):
            return [self.take_kwargs(part) for part in kwargs]
        if not isinstance(kwargs, Mapping):
            return kwargs
        plain, others = dict[str, Any](), dict[str, Any]()
        for name, value in kwargs.items():
            try:
                codec.encode(value)
            except codec.CodecError:
                others[name] = value
            else:
                plain[name] = value
        self.kwargs.append(others)
        return plain

    def name_wrappers(self, wrappers: Any, import_modules: Sequence[str]) -> Any:
        """Return the wrappers, with names in place of classes and functions.

        Classes that are also registered in workers are replaced with their registered
        names, so that crashes can be replayed.

        Args:
          wrappers: See `BatchEnv.local`.
          import_modules: Modules that workers import, which may register wrappers.
        """
        if not isinstance(wrappers, Sequence) or isinstance(wrappers, str):
            return wrappers  # `parse_wrappers` raises the error
        imported = {*user_envs.packages_of(import_modules), "envserve", "gymnasium"}
        tables = []
        for position, wrapper in enumerate(wrappers):
            if isinstance(wrapper, WrapperSpec):
                wrapper = functools.partial(_apply_recorded, wrapper)
            table = table_of(wrapper)
            package = str(getattr(wrapper, "__module__", "")).partition(".")[0]
            if callable(table) or (callable(wrapper) and package not in imported):
                name = user_envs.name_of_code(wrapper)[:180]
                # The brackets prevent conflicts with names of registered wrappers.
                table = {"name": f"<{name} {position}>"}
                self.wrappers[table["name"]] = wrapper
            tables.append(table)
        return tables

    def dumps(self) -> bytes:
        """Return the pickled code; b"" if there is none.

        Raises:
          EnvStartError: A part of the code cannot be pickled, or the code is too large.
        """
        if not (self.specs or self.env_fns or self.wrappers or any(self.kwargs)):
            return b""
        specs = {k: v for k, v in self.specs.items() if k not in self.separate}
        common = replace(self, specs=specs, separate={}, main=_main_of(specs))
        # Pickle all code at once, so that an object that several closures share is
        # included only once.
        try:
            pickled = _pickle(common)
        except Exception:
            functions = {f"env[{n}]": each for n, each in enumerate(self.env_fns)}
            parts = common.specs, common.main, self.wrappers, *self.kwargs, functions
            for name, part in chain.from_iterable(each.items() for each in parts):
                _check_part(name, part)
            raise
        if len(pickled) > _MAX_BYTES:
            raise EnvStartError(
                f"expected functions and classes that refer to at most "
                f"{_MAX_BYTES >> 20} MiB of data; got {len(pickled) >> 20} MiB; load "
                f"the data inside the functions"
            )
        together, separate = b"", self.separate
        if separate:
            main = _main_of(self.specs)
            together = _pickle(replace(self, separate={}, main=main))
            sizes = map(len, (pickled, together, *separate.values()))
            if sum(sizes) > _MAX_TOTAL_BYTES:
                together, separate = b"", {}
        return pickle.dumps((pickled, together, separate))

    @classmethod
    def loads(cls, pickled: bytes, env_name: str) -> Self:
        """Unpickle the code that the pool of the same user has sent.

        Args:
          pickled: Result of `dumps`.
          env_name: Name of the requested env.

        Raises:
          EnvStartError: A worker cannot load the code of the requested env.
        """
        if not pickled:
            return cls()
        # Detect a script that starts envs while it is imported: workers that import it
        # would start further workers, endlessly.
        user_envs.modules_being_imported.append("the module of a function or class")
        try:
            common, together, separate = pickle.loads(pickled)
            code: Self | None = None
            with contextlib.suppress(Exception):  # the parts below have the same error
                code = pickle.loads(together) if together else None
            if code is None:
                code = pickle.loads(common)
                for name, pair in separate.items():
                    code._load_separate(name, pair)
        except Exception as error:
            raise _unpickling_error(env_name, error) from error
        finally:
            user_envs.modules_being_imported.pop()
        for name, value in code.main.items():
            setattr(sys.modules["__main__"], name, value)
        for name, spec in code.specs.items():
            gymnasium.registry[name] = spec
        # The modules that define these envs register them again when they are imported.
        warnings.filterwarnings("ignore", ".*Overriding environment")
        for name, wrapper in code.wrappers.items():
            WRAPPERS[name] = RegisteredWrapper(wrapper, {}, is_limited=False)
        return code

    def _load_separate(self, name: str, pair: bytes) -> None:
        try:
            spec, main = pickle.loads(pair)
        except Exception as error:
            fail = functools.partial(_fail, str(_unpickling_error(name, error)))
            spec = EnvSpec(name, fail, vector_entry_point=fail)
            gymnasium.registry.setdefault(name, spec)
        else:
            self.specs[name] = spec
            self.main.update(main)

    def copy_env_fn(self, row: int) -> Callable[[], Env] | None:
        """Return a copy of the function that creates a row's env.

        Copies share no objects, as if each env had its own process. Returns None if the
        envs are created by name.
        """
        if not self.env_fns:
            return None
        self.copies.append(pickle.loads(_pickle(self.env_fns[row])))
        return self.copies[-1]

    @property
    def roots(self) -> list[Callable[..., Any]]:
        """The user's functions and classes, except those that workers can import."""
        entry_points = [spec.entry_point for spec in self.specs.values()]
        local_code = [
            entry_point
            for entry_point in entry_points
            if callable(entry_point)
            and not user_envs.is_importable(user_envs.name_of_code(entry_point))
        ]
        return [*self.copies, *self.wrappers.values(), *self.main.values(), *local_code]


def _apply_recorded(spec: WrapperSpec, env: Env) -> Env:
    """Apply a wrapper with the arguments that Gymnasium has recorded in its spec."""
    if spec.kwargs is None:
        raise WrapperError(
            f"{spec.name}: expected a wrapper that records its arguments with "
            f"RecordConstructorArgs; pass its class instead"
        )
    make: Any = load_env_creator(spec.entry_point)
    wrapped: Env = make(env, **spec.kwargs)
    return wrapped


def _pickle(value: object) -> bytes:
    import cloudpickle  # type: ignore[import-untyped]

    table = cloudpickle.Pickler.dispatch_table

    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        _, arguments = table[CodeType](code)
        return _code_in_file, (code.co_filename, *arguments)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar[Any] = ChainMap({CodeType: reduce_code}, table)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def _code_in_file(filename: str, *arguments: Any) -> CodeType:
    """Create a code object; cloudpickle itself drops the name of its file."""
    return CodeType(*arguments).replace(co_filename=filename)


def _pickle_loaded_files_by_value() -> None:
    """Let `_pickle` include the code of modules that workers cannot import.

    The modules of files that `ppo` has loaded, such as callbacks, are named after their
    paths. See also `is_loaded_by_path`.
    """
    for name, module in sys.modules.copy().items():
        if (
            issubclass(type(module), ModuleType)  # `isinstance` runs code of a proxy
            and user_envs.globals_of(module).get("__name__") == name != "__main__"
            and user_envs.is_loaded_by_path(name)
        ):
            import cloudpickle

            cloudpickle.register_pickle_by_value(module)


@functools.cache
def _names_in_gymnasium() -> frozenset[Any]:
    """Return a set that contains the names of all envs that Gymnasium registers.

    These names are constants in the code of `gymnasium.envs`. The set also contains the
    other constants of this code.
    """
    module: Any = gymnasium.envs
    return frozenset(module.__spec__.loader.get_code(module.__name__).co_consts)


def _original(spec: EnvSpec) -> EnvSpec:
    """Return a spec with the vector entry point that `envserve.gym` has replaced."""
    if not str(spec.vector_entry_point).startswith("envserve.gym:"):
        return spec
    known = getattr(gymnasium.registry.get(spec.id), "vector_entry_point", None)
    return replace(spec, vector_entry_point=replaced_entry_points.get(spec.id, known))


def _main_objects(spec: EnvSpec) -> dict[str, Any]:
    """Return the objects of the script that a spec names, like "__main__:NAME"."""
    wrappers = (item.entry_point for item in spec.additional_wrappers)
    entry_points = spec.entry_point, spec.vector_entry_point, *wrappers
    text = " ".join(item for item in entry_points if isinstance(item, str))
    main = vars(sys.modules["__main__"])
    names = main.keys() & {*re.findall(r"__main__:(\w+)", text)}
    return {name: main[name] for name in names}


def _main_of(specs: Mapping[str, EnvSpec]) -> dict[str, Any]:
    return dict(chain(*(_main_objects(spec).items() for spec in specs.values())))


def _has_code(spec: EnvSpec) -> bool:
    """Return whether a spec contains or names code of this process, or large data."""
    return (
        callable(spec.entry_point)
        or callable(spec.vector_entry_point)
        or bool(spec.additional_wrappers or _main_objects(spec))
        or not {*map(type, spec.kwargs.values())} <= {bool, int, float, str, type(None)}
    )


def _unpickling_error(env_name: str, error: Exception) -> EnvStartError:
    return EnvStartError(
        f"{env_name}: workers cannot unpickle the functions and classes that your "
        f"script passes to them: {type(error).__name__}: {error}"
    )


def _fail(text: str, **_: Any) -> NoReturn:
    """Raise the error of an env that cannot be created."""
    raise EnvStartError(text)


def _check_part(name: str, part: object) -> None:
    """Raise EnvStartError if a part of the code cannot be pickled."""
    try:
        _pickle(part)
    except Exception as error:
        raise EnvStartError(
            f"{name}: expected code that workers can receive; it refers to an object "
            f"that cannot be pickled ({type(error).__name__}: {error}); create that "
            f"object inside the function"
        ) from error
