"""Adapts Keras and AutoGraph: selects Keras 2 (tf-keras), refuses Keras 3, converts only calls.

Horovod 0.28 and custom train steps require Keras 2. TensorFlow reads ``TF_USE_LEGACY_KERAS`` once, during
import. If the variable isn't set by then, ``tensorflow.keras`` is Keras 3 for the rest of the process.

`convert_only_calls` reduces the first ``fit`` to one second. AutoGraph converts a function, and each function
that it calls, so that Python's ``if`` and ``while`` work on tensors. TensorFlow exempts its own package and
``keras``, but some versions don't exempt ``tf_keras``, the same package under a newer name. With these, the
first train step of a process would convert a hundred functions of Keras and gmeta, 0.1 s each, although none
of them has a tensor in an ``if``. Other versions exempt ``tf_keras`` and everything that its functions call:
a user's ``train_step`` or activation.

These functions therefore get a special conversion, which takes about a millisecond: ``f(x)`` becomes
``converted_call(f, (x,))``, and the rest is unchanged. A user's function that Keras calls is fully converted,
and so is a function that is passed to ``tf.function`` itself, such as Keras' loop over several steps.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import importlib.util
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from gmeta.core.errors import KerasError
from gmeta.core.version import WANTED, describe_misfit, find_tensorflow

_VARIABLE = "TF_USE_LEGACY_KERAS"
_KERAS_3 = "keras"  # the package; that of Keras 2 is tf_keras
_TRUE = ("1", "true", "True")  # the spellings that TensorFlow accepts


def select_legacy_keras() -> None:
    """Make ``tf.keras`` refer to ``tf_keras``, and silence TensorFlow's start-up messages.

    ``TF_CPP_MIN_LOG_LEVEL`` is set to 3 unless it is set already: the wheel prints three CUDA
    registration lines at level "error" on every machine. Set it to 0 to see everything.

    Raises:
      KerasError: TensorFlow was already imported without the variable, which selected Keras 3; or tf-keras
        isn't installed.
    """
    if importlib.util.find_spec("tf_keras") is None:
        raise KerasError(_lack_of_keras_2())
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    value = os.environ.get(_VARIABLE)
    if value in _TRUE:
        return
    if value is not None:
        raise KerasError(
            f"{_VARIABLE}={value} selects Keras 3, but gmeta needs Keras 2: export {_VARIABLE}=1"
        )
    if "tensorflow" in sys.modules:
        raise KerasError(
            "TensorFlow was imported before gmeta and has chosen Keras 3: "
            f"put `import gmeta` above `import tensorflow`, or export {_VARIABLE}=1"
        )
    os.environ[_VARIABLE] = "1"


def _lack_of_keras_2() -> str:
    """Return which tf-keras to install: each minor version matches TensorFlow's of the same number."""
    found = find_tensorflow()
    if found is None:
        install = " ".join(f"'{line}'" for line in WANTED)
        return f"neither TensorFlow nor tf-keras, which is Keras 2, is installed: pip install {install}"
    name, version, _ = found
    misfit = describe_misfit(version)
    if misfit is not None:
        return misfit
    minor = ".".join(version.split(".")[:2])
    # tf-keras requires the distribution `tensorflow`, which would overwrite another distribution's files.
    alone = "" if name == "tensorflow" else "--no-deps "
    return (
        f"tf-keras isn't installed, and gmeta needs Keras 2, which it is: TensorFlow {version} goes with "
        f"pip install {alone}'tf-keras=={minor}.*'"
    )


def refuse_keras_3(receiver: str, *given: Any) -> None:
    """Refuse objects of Keras 3, which TensorFlow installs beside Keras 2 as the package ``keras``.

    Keras 2 would mistake them for its own and fail later: "'Variable' object has no attribute '_unique_id'".

    Args:
      receiver: What received them, for the message.
      *given: Anything; lists, tuples and mappings are searched.

    Raises:
      KerasError: An object's class, or the class that it derives from, is one of Keras 3; or such a class
        itself was passed. The message names its counterpart in ``tf.keras``.
    """
    for value in _leaves(given):
        kind = value if isinstance(value, type) else type(value)
        base = next((cls for cls in kind.__mro__ if cls.__module__.split(".")[0] == _KERAS_3), None)
        if base is None:
            continue
        name, counterpart = _names(base)
        what, remedy = name, f"use {counterpart}"
        if kind is not base:
            what, remedy = f"{kind.__qualname__}, a {name},", f"derive it from {counterpart}"
        raise KerasError(f"{receiver}: {what} is of Keras 3, but gmeta needs Keras 2: {remedy}")


def submodules(module: Any) -> list[Any]:
    """Find the modules in the attributes of a ``tf.Module``, recursively, each once.

    The result equals ``module.submodules``, which fails with wrapt 1.16 to 2.1 on Python 3.12 or newer if a
    layer has a tuple of layers: ``tf.nest`` checks whether a value has the methods of a protocol, and Python
    looks for them in a ``__dict__`` that the wrapper around the tuple doesn't provide.
    """
    import tensorflow as tf

    seen = {id(module)}

    def inside(part: Any) -> Iterator[Any]:
        own = []
        for name in sorted(vars(part)):
            if name in part._TF_MODULE_IGNORED_PROPERTIES:
                continue
            for leaf in _leaves(vars(part)[name]):
                if isinstance(leaf, tf.Module) and id(leaf) not in seen:
                    seen.add(id(leaf))
                    own.append(leaf)
        yield from own
        for each in own:
            yield from inside(each)

    return list(inside(module))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        yield value
        return
    for each in value:
        yield from _leaves(each)


def _names(cls: type) -> tuple[str, str]:
    """Return the public names of a Keras 3 class and of its counterpart in Keras 2."""
    import tf_keras

    if cls.__name__ == "KerasTensor":
        return "a tensor of keras.Input", "tf.keras.Input and tf.keras.layers"
    path = cls.__module__.split(".")
    rooms = path[2:-1] if path[1:2] == ["src"] else path[1:]
    for depth in range(len(rooms), 0, -1):
        found: Any = tf_keras
        for name in (*rooms[:depth], cls.__name__):
            found = getattr(found, name, None)
        if found is not None:
            public = ".".join((*rooms[:depth], cls.__name__))
            return f"keras.{public}", f"tf.keras.{public}"
    return f"{cls.__module__}.{cls.__name__}", "its counterpart in tf.keras"


_API = "tensorflow.python.autograph.impl.api"
_CONFIG = "tensorflow.python.autograph.core.config"
_INSPECT = "tensorflow.python.util.tf_inspect"
_FRAMEWORKS = frozenset({"tf_keras", "gmeta", "contextlib"})
_WITHOUT_USERS = ("gmeta.core", "gmeta.ops", "gmeta.layers.embedding", "gmeta.layers.exchange")
"""Modules whose functions call no function of a user, so that nothing below them needs a conversion."""
_CALL = "gmeta_converted_call"  # the free variable that holds `converted_call`
_MADE = "gmeta_made"  # the function's name during compilation; under its own name, it would find itself
_FUTURES = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)
_NATIVE = frozenset(dir(builtins))  # including `super` and `locals`, which inspect the calling frame


def convert_only_calls() -> None:
    """Install the conversion, now or as soon as TensorFlow is imported. A second call does nothing.

    Already converted functions are unchanged. If a function or a version of TensorFlow isn't supported,
    AutoGraph converts as without gmeta.
    """
    if _API in sys.modules:
        _install(sys.modules[_API])
    elif not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds AutoGraph's module like other finders, and installs the conversion once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _API:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_install(module: ModuleType) -> None:
                load(module)
                _install(module)

            spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


def _install(api: Any) -> None:
    convert_all = getattr(api, "_convert_actual", None)
    if convert_all is None or hasattr(convert_all, "__wrapped__"):
        return

    @functools.wraps(convert_all)
    def convert(entity: Any, context: Any) -> Any:
        options = context.options
        if _is_of_framework(entity) and not options.user_requested and not options.optional_features:
            try:
                return _with_converted_calls(entity, options.call_options(), api)
            except (LookupError, SyntaxError):  # a lambda, or a function without its source
                pass
        return convert_all(entity, context)

    api._convert_actual = convert
    # TensorFlow's own function has the same result, but first reads the source of every function on the
    # stack.
    sys.modules[_INSPECT].currentframe = lambda: sys._getframe(1)  # type: ignore[attr-defined]
    # Newer versions exempt `tf_keras`.
    config: Any = sys.modules[_CONFIG]
    rules = [rule for rule in config.CONVERSION_RULES if not rule.matches("tf_keras")]
    config.CONVERSION_RULES = (*map(config.DoNotConvert, _WITHOUT_USERS), *rules)


def _is_of_framework(entity: Any) -> bool:
    """Return whether a function belongs to Keras or gmeta, or is such a function decorated by TensorFlow."""
    names = getattr(entity, "__module__", None), getattr(entity, "__globals__", {}).get("__name__")
    wrapped, itself = ((name or "").partition(".")[0] for name in names)
    return wrapped in _FRAMEWORKS and itself in (*_FRAMEWORKS, "tensorflow")


def _with_converted_calls(entity: Any, options: Any, api: Any) -> Callable[..., Any]:
    """Return a function that behaves like ``entity``, but makes each call through ``converted_call``.

    Raises:
      LookupError, SyntaxError: See `_compiled`.
    """
    code: CodeType = entity.__code__
    cells = dict(zip(code.co_freevars, entity.__closure__ or (), strict=True))
    if _CALL not in cells:  # otherwise, it was defined in a converted function, and is converted
        code, cells[_CALL] = _compiled(code), CellType(functools.partial(api.converted_call, options=options))
    closure = tuple(cells[name] for name in code.co_freevars)
    made: Any = FunctionType(code, entity.__globals__, code.co_name, entity.__defaults__, closure)
    made.__kwdefaults__ = entity.__kwdefaults__
    made.ag_module, made.ag_source_map = None, {}  # AutoGraph reads these: its lines are those of the source
    return made


@functools.cache
def _compiled(code: CodeType) -> CodeType:
    """Recompile a function's source with its calls converted.

    Raises:
      LookupError: There is no source, it isn't a ``def``, or it doesn't match the code.
      SyntaxError: The source is incomplete.
    """
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        tree = _parsed(lines[: _last_line(code) - code.co_firstlineno + 1], code.co_firstlineno)
    except SyntaxError:  # a statement continues after its last line with code
        tree = _parsed(inspect.getblock(lines), code.co_firstlineno)
    if not tree.body:
        raise LookupError(f"no source: {code.co_filename}")
    function: Any = tree.body[0].body[0] if isinstance(tree.body[0], ast.If) else tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        raise LookupError(f"not a function: {ast.dump(function)}")
    function.name, function.decorator_list = _MADE, []
    function.args.defaults = [ast.copy_location(ast.Constant(None), each) for each in function.args.defaults]
    _Calls().visit(function)
    # To be compiled as free variables, they must be local to an enclosing function.
    around = ast.parse(f"def around({', '.join((*code.co_freevars, _CALL))}): pass")
    outer: Any = around.body[0]
    outer.body = [function]
    made = compile(around, code.co_filename, "exec", code.co_flags & _FUTURES, dont_inherit=True)
    for name in ("around", _MADE):
        made = next(part for part in made.co_consts if isinstance(part, CodeType) and part.co_name == name)
    if set(made.co_names) != set(code.co_names):  # such as `_Class__name`, which is `__name` in the source
        raise LookupError(f"{code.co_filename}:{code.co_firstlineno} isn't what was imported")
    return made.replace(co_name=code.co_name)


def _parsed(block: Sequence[str], first: int) -> ast.Module:
    """Parse lines that are numbered from ``first``."""
    # A method's source is indented, so it needs a preceding statement.
    before = ["\n"] * (first - 1)
    if block and block[0][:1].isspace():
        before[-1] = "if True:\n"
    return ast.parse("".join([*before, *block]))


def _last_line(code: CodeType) -> int:
    """Return the last line with code of a function, including nested functions."""
    if sys.version_info >= (3, 11):
        lines = [end for _, end, _, _ in code.co_positions() if end is not None]
    else:
        lines = [line for _, _, line in code.co_lines() if line is not None]
    within = [_last_line(part) for part in code.co_consts if isinstance(part, CodeType)]
    return max([code.co_firstlineno, *lines, *within])


class _Calls(ast.NodeTransformer):
    """Turns ``f(x, y=z)`` into ``gmeta_converted_call(f, (x,), {"y": z})``."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _NATIVE:
            return node

        def at(made: Any) -> Any:
            return ast.copy_location(made, node)

        names = [  # None is for `**z`
            None if each.arg is None else at(ast.Constant(each.arg)) for each in node.keywords
        ]
        named = at(ast.Dict(names, [each.value for each in node.keywords]))
        arguments = [node.func, at(ast.Tuple(node.args, ast.Load())), named]
        return at(ast.Call(at(ast.Name(_CALL, ast.Load())), arguments, []))

    def visit_With(self, node: ast.With) -> ast.AST:
        """Leave context managers unchanged, like AutoGraph."""
        node.body = [self.visit(each) for each in node.body]
        return node
