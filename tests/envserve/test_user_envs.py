"""User envs from files, packages and classes, and errors for invalid references."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import EnvSpec

from envserve.client import BatchEnv
from envserve.client.factory import local_settings
from envserve.envs import registry
from envserve.envs.registry import import_env_modules, make_env, offered_names
from envserve.envs.user_envs import (
    env_name_of,
    is_importable,
    name_and_imports,
    with_absolute_path,
    writable_by_others,
)
from envserve.errors import EnvStartError, UnknownEnv
from envserve.settings import EnvRequest, HostSettings, PoolSettings
from tests.envserve.conftest import Serve

WALK = """
import gymnasium
import numpy as np

class Walk(gymnasium.Env):
    def __init__(self, size=4, render_mode=None):
        self.observation_space = gymnasium.spaces.Box(-1, 1, (size,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}

class Far:
    class Walk(Walk):
        def __init__(self, gait, **more):
            super().__init__(**more)

class Small(Walk):
    def __init__(self):
        super().__init__(size=1)

class Plain(gymnasium.Env):
    pass

def make_walk(size=3):
    return Walk(size)

def make_far(gait):
    return Far.Walk(gait)

gymnasium.register("Walk-v0", "walk_file:Walk", max_episode_steps=10)
"""


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo a test's imports and registrations."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules, names, came = (
        set(known)
        for known in (sys.modules, gymnasium.registry, registry._names_by_module)
    )
    yield
    for old, known in (
        (modules, sys.modules),
        (names, gymnasium.registry),
        (came, registry._names_by_module),
    ):
        for name in set(known) - old:
            del known[name]
    registry._register_installed.cache_clear()


@pytest.fixture
def walk_file(tmp_path: Path) -> str:
    path = tmp_path / "walk_file.py"
    path.write_text(WALK)
    return str(path)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("CartPole-v1", "CartPole-v1"),
        ("ALE/Pong-v5", "ALE/Pong-v5"),
        ("my_package.envs:Walk-v0", "my_package.envs:Walk-v0"),
        ("../a/my_env.py:Walk", "my_env:Walk"),
        ("my_env.py:Far.Walk", "my_env:Far.Walk"),
        ("a/my_env.py", "a/my_env.py"),
        ("c:d/my_env.py:Walk", "my_env:Walk"),
        (CartPoleEnv, "gymnasium.envs.classic_control.cartpole:CartPoleEnv"),
        (make_env, "envserve.envs.registry:make_env"),
    ],
)
def test_the_plain_name_of_a_reference(word: object, name: str) -> None:
    assert env_name_of(word) == name


def test_workers_import_the_module_of_a_reference() -> None:
    here = Path.cwd()
    words = ("other", f"{here}/b.py", f"{here}/my_env.py:Walk")
    assert name_and_imports("my_env.py:Walk", ["other", "b.py"]) == (
        "my_env:Walk",
        words,
    )
    assert name_and_imports("a.b:Walk-v0") == ("a.b:Walk-v0", ("a.b:Walk-v0",))
    assert name_and_imports("b:Walk", ["/a/b.py:Walk"])[1] == ("/a/b.py:Walk",)
    assert name_and_imports("CartPole-v1", ["other"]) == ("CartPole-v1", ("other",))
    path = "gymnasium.envs.classic_control.cartpole:CartPoleEnv"
    assert name_and_imports(CartPoleEnv) == (path, (path,))
    assert with_absolute_path("no_file:Walk") == "no_file:Walk"
    assert with_absolute_path("c:d/b.py") == f"{here}/c:d/b.py"


def test_a_file_is_imported_although_a_module_of_its_name_was_loaded_by_path(
    walk_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ModuleType("walk_file")
    other.__file__ = "/no/folder/walk_file.py"
    monkeypatch.setitem(sys.modules, "walk_file", other)
    reference = f"{walk_file}:Walk"
    assert name_and_imports(reference) == ("walk_file:Walk", (reference,))
    settings = local_settings(reference, 1, 1, {}, BatchEnv.local)
    assert settings.is_replayable


def test_modules_of_packages_that_extend_their_path_are_importable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "extended"
    (package / "more").mkdir(parents=True)
    (package / "__init__.py").write_text("__path__.append(f'{__path__[0]}/more')")
    (package / "more" / "walk_file.py").write_text(WALK)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("extended.walk_file")
    assert is_importable("extended.walk_file:Walk")


class StrictFinder:
    """A finder that requires the arguments that Python passes to it."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: object) -> None:
        del name, path, target


def test_a_finder_may_require_all_arguments_of_python(
    walk_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", [StrictFinder, *sys.meta_path])
    import_env_modules([walk_file])
    assert is_importable("walk_file:Walk")


def test_a_file_of_a_namespace_package_that_is_not_loaded_is_importable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plugins_of_test" / "walks").mkdir(parents=True)
    module = ModuleType("plugins_of_test.walks.walk_file")
    module.__file__ = str(tmp_path / "plugins_of_test" / "walks" / "walk_file.py")
    Path(module.__file__).write_text(WALK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert is_importable(f"{module.__name__}:Walk")


def test_a_deleted_working_directory_leaves_references_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert with_absolute_path("walk.py:Walk") == "walk.py:Walk"


def test_the_error_about_an_env_that_servers_cannot_import_states_a_remedy() -> None:
    class Local(CartPoleEnv):
        pass

    for env in (Local, lambda: CartPoleEnv()):
        with pytest.raises(UnknownEnv, match=r"of this script.*\"my_env\.py:MyEnv\""):
            env_name_of(env)
    script = type("Mine", (CartPoleEnv,), {"__module__": "__main__"})
    with pytest.raises(UnknownEnv, match="got 'Mine' of this script"):
        env_name_of(script)
    for odd in (42, None, CartPoleEnv()):
        with pytest.raises(TypeError, match="expected the name of an env, or a class"):
            name_and_imports(odd)
    with pytest.raises(UnknownEnv, match=r"name an env in it: my_env\.py:MyEnv"):
        name_and_imports("my_env.py")
    wrong: tuple[Any, ...] = ("my", [Path("my.py")], [None])
    for modules in wrong:
        with pytest.raises(TypeError, match="import_modules: expected a list of mod"):
            BatchEnv.local("CartPole-v1", 1, import_modules=modules)


def test_workers_import_the_module_of_an_env_that_the_caller_registered() -> None:
    script: Any = type("Mine", (CartPoleEnv,), {"__module__": "__main__"})
    function: Any = make_env
    gymnasium.register("Mine-v0", script)
    gymnasium.register("ByText-v0", "my_package.envs:Walk")
    gymnasium.register("ByClass-v0", function)
    assert name_and_imports("ByText-v0") == ("ByText-v0", ("my_package.envs",))
    assert name_and_imports("ByText-v0", ["my_package"])[1] == ("my_package",)
    assert name_and_imports("ByClass-v0", ["other"])[1] == (
        "other",
        "envserve.envs.registry",
    )
    assert name_and_imports("CartPole-v1")[1] == ()
    # The pool sends the class to the workers.
    assert name_and_imports("Mine-v0", ["other"])[1] == ("other",)


def test_a_file_provides_its_registered_envs_and_named_classes(walk_file: str) -> None:
    assert import_env_modules([walk_file]) == ("Walk-v0",)
    assert import_env_modules([walk_file]) == ("Walk-v0",)
    words = [f"{walk_file}:{name}" for name in ("Walk", "Walk-v0", "make_walk")]
    names = import_env_modules(words)
    assert names == ("walk_file:Walk", "walk_file:Walk-v0", "walk_file:make_walk")
    limits, sizes = [], []
    for name in names:
        kwargs = {"size": 2, "max_episode_steps": None} if "make" in name else {}
        env = make_env(name, kwargs)
        limits.append(env.spec and env.spec.max_episode_steps)
        sizes.append(env.observation_space.shape)
    assert (limits, sizes) == ([None, 10, None], [(4,), (4,), (2,)])


def test_a_registered_function_keeps_its_limit_and_arguments(walk_file: str) -> None:
    call = 'register("Walk-v1", make_walk, max_episode_steps=10, kwargs={"size": 5})'
    Path(walk_file).write_text(f"{WALK}gymnasium.{call}")
    (name,) = import_env_modules([f"{walk_file}:Walk-v1"])
    env = make_env(name, {})
    assert env.spec is not None
    assert env.spec.max_episode_steps == 10
    assert env.observation_space.shape == (5,)


def test_a_file_provides_its_envs_after_another_file_has_imported_it(
    walk_file: str, tmp_path: Path
) -> None:
    (tmp_path / "walk_package").mkdir()
    code = 'import gymnasium; gymnasium.register("Far-v0", "walk_package.envs:Far")'
    (tmp_path / "walk_package" / "__init__.py").write_text(code)
    (tmp_path / "first_file.py").write_text("import walk_file, walk_package")
    files = [str(tmp_path / "first_file.py"), walk_file]
    assert offered_names(files) == ("Far-v0", "Walk-v0")
    assert import_env_modules([walk_file]) == ("Walk-v0",)
    assert import_env_modules(["walk_package"]) == ("Far-v0",)


def test_a_file_also_provides_the_registered_envs_that_it_replaces(
    walk_file: str,
) -> None:
    with open(walk_file, "a") as file:
        file.write('gymnasium.register("Small-v0", "walk_file:Small")\n')
        file.write('gymnasium.register("Far-v0", lambda: Walk(), max_episode_steps=9)')
    for name in ("Walk-v0", "Far-v0"):
        gymnasium.register(name, "gymnasium.envs.classic_control:CartPoleEnv")
    with pytest.warns(UserWarning, match="Overriding environment (Walk|Far)-v0"):
        names = import_env_modules([walk_file])
    assert sorted(names) == ["Far-v0", "Small-v0", "Walk-v0"]


def test_a_server_offers_only_the_envs_that_its_operator_names(walk_file: str) -> None:
    host = HostSettings(env_names=(f"{walk_file}:Walk", walk_file, "CartPole-v1"))
    names = offered_names(host.env_names, host.import_modules)
    assert names == ("CartPole-v1", "Walk-v0", "walk_file:Walk")
    for name in ("walk_file:make_walk", f"{walk_file}:Walk", "this:zen"):
        with pytest.raises(UnknownEnv):
            make_env(name, {})
    asked = EnvRequest(env_name="this:Zen", num_envs=1, seed=0)
    assert PoolSettings.of(asked, host).import_modules == host.import_modules
    assert "this" not in sys.modules


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("no/such.py", None, "no/such.py: no such file$"),
        ("my env.py", "", "whose name has only letters"),
        (
            "json.py",
            "",
            "a module of the standard library has the same name; rename your file",
        ),
        (
            "__main__.py",
            "",
            "a module of the standard library has the same name; rename your file",
        ),
        (
            "numpy.py",
            "",
            r"numpy/__init__\.py is a different module with the same name; rename your",
        ),
        ("torn.py", "\n1 / 0", r"ZeroDivisionError: .* \(\S*/torn\.py:2\)"),
        ("odd.py", "def f(:", "SyntaxError"),
        ("lean.py", "\n\nimport no_such", r"'no_such' \(\S*/lean\.py:3\); install it"),
        (
            "relative.py",
            "from . import other",
            r"no known parent package .*; name the module instead, .*\.relative$",
        ),
    ],
)
def test_the_error_about_a_file_that_cannot_be_imported_names_it(
    file: str, text: str | None, message: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(EnvStartError, match=message) as caught:
        import_env_modules([f"{tmp_path / file}:Walk"])
    assert str(tmp_path / file) in str(caught.value)


def test_a_missing_file_raises_before_a_worker_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("envserve.client.factory.Pool")
    for name, modules in (("nofile.py:Walk", []), ("CartPole-v1", ["nofile.py"])):
        with pytest.raises(EnvStartError, match=r"/nofile\.py: no such file$"):
            BatchEnv.local(name, 2, import_modules=modules)


def test_a_module_that_starts_envs_on_import_raises_with_a_remedy(
    tmp_path: Path,
) -> None:
    path = tmp_path / "script_file.py"
    path.write_text(f"{WALK}\nfrom envserve.client import BatchEnv\n")
    with path.open("a") as file:
        file.write("BatchEnv.local('script_file.py:Walk', 1)\n")
    with pytest.raises(EnvStartError, match=r"starts envs .*__main__.*_file\.py:38,"):
        import_env_modules([f"{path}:Walk"])
    assert name_and_imports("CartPole-v1")[0] == "CartPole-v1"  # the import has ended


@pytest.mark.parametrize("above", [-1, 0, 1])
def test_a_file_that_other_users_can_change_is_not_imported(
    walk_file: str, tmp_path: Path, above: int
) -> None:
    path = tmp_path / "up" / "in" / "walk_file.py"
    path.parent.mkdir(parents=True)
    shutil.copy(walk_file, path)
    odd = [path, *path.parents][above + 1]
    odd.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(path.parent)
    for folder in (path.parent, link):
        with pytest.raises(
            EnvStartError, match=f"other users can write to .*{odd.name}; .*chmod go-w"
        ):
            import_env_modules([f"{folder}/walk_file.py"])
    assert "walk_file" not in sys.modules
    odd.chmod(0o1777)
    assert bool(writable_by_others(str(path))) == (above == -1)


def test_the_error_about_a_missing_env_lists_the_known_ones(
    walk_file: str, tmp_path: Path
) -> None:
    (tmp_path / "empty_file.py").write_text("")
    with pytest.raises(UnknownEnv, match=r"empty_file\.py registers no env; .*:MyEnv"):
        offered_names([str(tmp_path / "empty_file.py")])
    with pytest.raises(UnknownEnv, match=r"expected walk_file.* to register .*'nope'"):
        import_env_modules([f"{walk_file}:nope"])
    with pytest.raises(UnknownEnv, match=r"neither \(.*\); did you mean Walk\?"):
        import_env_modules([f"{walk_file}:Wlak"])
    with pytest.raises(UnknownEnv, match=r"the env 'np', .* pass only 'np'\)$"):
        import_env_modules([f"{walk_file}:np"])  # exists, but is not callable
    import_env_modules([walk_file])
    text = (
        r"no env named 'Foo-v0' .*empty_file\.py registers no env.* registers Walk-v0"
    )
    with pytest.raises(UnknownEnv, match=text):
        make_env("Foo-v0", {})
    with pytest.raises(UnknownEnv, match=r"need --import ale_py"):
        make_env("ALE/Nothing-v5", {})


def test_envpool_refers_to_the_module_that_registers_its_envs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "envserve.envpool", ModuleType("as_if_installed"))
    gymnasium.registry["envpool/CartPole-v1"] = EnvSpec("envpool/CartPole-v1")
    assert import_env_modules(["envpool"]) == ()  # registered before it was imported
    (name,) = import_env_modules(["envpool:CartPole-v1"])
    assert name == "envpool:CartPole-v1"
    with pytest.raises(EnvStartError, match=r"a vector env; .*vectorized=True.*--vec"):
        make_env(name, {})


def test_vector_envs_of_a_server_are_requested_by_their_plain_names() -> None:
    host = HostSettings(vector_envs=("a/walk_file.py:Walk",))
    assert host.import_modules == (f"{Path.cwd()}/a/walk_file.py:Walk",)
    for name, is_one in (("walk_file:Walk", True), ("Walk", False)):
        asked = EnvRequest(env_name=name, num_envs=1, seed=0)
        assert PoolSettings.of(asked, host).vectorized is is_one


def test_installed_packages_offer_envs_as_entry_points(tmp_path: Path) -> None:
    (tmp_path / "walk_file.py").write_text(WALK)
    info = tmp_path / "walks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: walks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[envserve.envs]\nwalks/Direct-v0 = walk_file:Walk\nall = walk_file\n"
    )
    sys.path.append(str(tmp_path))
    with pytest.raises(UnknownEnv):
        make_env("Nothing-v0", {})
    for name in ("walks/Direct-v0", "Walk-v0"):
        assert make_env(name, {}).observation_space.shape == (4,)
    assert {"walks/Direct-v0", "Walk-v0"} <= set(offered_names())


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        (
            "Walk",
            {"colour": 1},
            r"keyword argument 'colour'; .* takes render_mode, size",
        ),
        ("Far.Walk", {}, r"missing .* 'gait'; .* takes gait, render_mode, size$"),
        ("Far.Walk", {"gait": 1, "colour": 1}, "'colour'; .* takes gait, render_mode,"),
        ("Small", {"size": 2}, "'size'; walk_file:Small takes none$"),
        ("Plain", {"size": 2}, r"Plain\(\) takes no arguments, got size; "),
        ("make_walk", {"colour": 1}, "'colour'; walk_file:make_walk takes size$"),
        ("make_far", {}, r"make_far\(\) missing .* 'gait'; .*make_far takes gait$"),
    ],
)
def test_the_error_about_a_wrong_argument_lists_the_arguments_of_the_env(
    name: str, kwargs: dict[str, Any], text: str, walk_file: str
) -> None:
    (plain,) = import_env_modules([f"{walk_file}:{name}"])
    with pytest.raises(EnvStartError, match=f"^env_kwargs: .*{text}"):
        make_env(plain, kwargs)


def test_an_error_inside_a_constructor_is_not_replaced(walk_file: str) -> None:
    with Path(walk_file).open("a") as file:
        file.write("def bad():\n    return Walk(colour=1)\n")
        file.write("def worse():\n    return Far.Walk()\n")
    for name, text in (("bad", "'colour'"), ("worse", "missing .* 'gait'")):
        (plain,) = import_env_modules([f"{walk_file}:{name}"])
        with pytest.raises(TypeError, match=text):
            make_env(plain, {})


def test_workers_run_user_envs(walk_file: str) -> None:
    folder = Path(walk_file).parent / "c:d"
    folder.mkdir()
    walk_file = shutil.move(walk_file, str(folder))
    with BatchEnv.local(
        f"{walk_file}:make_walk", 2, 1, env_kwargs={"size": 5}
    ) as batch:
        assert batch.reset().shape == (2, 5)
        assert batch.spec.env_name == "walk_file:make_walk"
    text = r"^env_kwargs: Walk\.__init__\(\) got .* render_mode, size$"
    with pytest.raises(EnvStartError, match=text):
        BatchEnv.local(f"{walk_file}:Walk", 1, 1, env_kwargs={"colour": 1})
    with pytest.raises(EnvStartError, match=r"'Wlak', or .* mean Walk[?]$"):
        BatchEnv.local(f"{walk_file}:Wlak", 1, 1)


def test_server_and_client_can_use_the_same_reference(
    serve: Serve, walk_file: str
) -> None:
    folder, file = Path(walk_file).parent, Path(walk_file).name
    server = serve(file, f"{file}:Walk", imports=(), cwd=folder)
    assert "with 2 env names" in server.ready_line
    for word in (f"elsewhere/{file}:Walk", "Walk-v0"):
        with BatchEnv.connect(word, [server.address], 2) as batch:
            assert batch.reset().shape == (2, 4)
    with pytest.raises(UnknownEnv, match="there is only Walk-v0, walk_file:Walk"):
        BatchEnv.connect("os:system", [server.address], 2)
