"""Makes AutoGraph convert only the calls in Keras' and gmeta's functions: a first ``fit`` takes one second.

AutoGraph converts a function so that Python's ``if`` and ``while`` work on tensors, and each function that
this one calls. TensorFlow exempts its own package and ``keras``, but in some versions not ``tf_keras``, which
is the same under a newer name. There, the first train step of a process would convert a hundred functions of
Keras and gmeta, 0.1 s each, although none of them has a tensor in an ``if``. Other versions have a rule that
exempts ``tf_keras``, and with it what its functions call: a user's ``train_step`` or activation.

So these functions get a conversion of their own, which takes about a millisecond: ``f(x)`` becomes
``converted_call(f, (x,))``, and the rest stays. A user's function that Keras calls is converted as a whole,
and so is a function that is given to ``tf.function`` itself, such as Keras' loop over several steps.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

_API = "tensorflow.python.autograph.impl.api"
_CONFIG = "tensorflow.python.autograph.core.config"
_INSPECT = "tensorflow.python.util.tf_inspect"
_FRAMEWORKS = frozenset({"tf_keras", "gmeta", "contextlib"})
_WITHOUT_USERS = ("gmeta.core", "gmeta.ops", "gmeta.layers.embedding", "gmeta.layers.exchange")
"""Modules whose functions call no function of a user, so that nothing below them needs a conversion."""
_CALL = "gmeta_converted_call"  # the free variable that holds `converted_call`
_MADE = "gmeta_made"  # the function's name while it is compiled; by its own, it would find itself
_FUTURES = functools.reduce(
    lambda flags, name: flags | getattr(__future__, name).compiler_flag, __future__.all_feature_names, 0
)
_NATIVE = frozenset(dir(builtins))  # among them `super` and `locals`, which look at the frame that calls them


def convert_only_calls() -> None:
    """Install the conversion, now or as soon as TensorFlow is imported. A second call does nothing.

    Functions that have been converted before stay as they are. Where a function or a version of TensorFlow
    doesn't fit, AutoGraph converts as it does without gmeta.
    """
    if _API in sys.modules:
        _install(sys.modules[_API])
    elif not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds AutoGraph's module as others do, and installs the conversion once it is loaded."""

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
    # TensorFlow's own has the same result, but first reads the source of every function on the stack.
    sys.modules[_INSPECT].currentframe = lambda: sys._getframe(1)  # type: ignore[attr-defined]
    # Newer versions exempt `tf_keras`.
    config: Any = sys.modules[_CONFIG]
    rules = [rule for rule in config.CONVERSION_RULES if not rule.matches("tf_keras")]
    config.CONVERSION_RULES = (*map(config.DoNotConvert, _WITHOUT_USERS), *rules)


def _is_of_framework(entity: Any) -> bool:
    """Return whether a function is Keras' or gmeta's, or what TensorFlow's decorators make of such a one."""
    names = getattr(entity, "__module__", None), getattr(entity, "__globals__", {}).get("__name__")
    wrapped, itself = ((name or "").partition(".")[0] for name in names)
    return wrapped in _FRAMEWORKS and itself in (*_FRAMEWORKS, "tensorflow")


def _with_converted_calls(entity: Any, options: Any, api: Any) -> Callable[..., Any]:
    """Return a function that does what ``entity`` does, but makes each call through ``converted_call``.

    Raises:
      LookupError, SyntaxError: See `_compiled`.
    """
    code: CodeType = entity.__code__
    cells = dict(zip(code.co_freevars, entity.__closure__ or (), strict=True))
    if _CALL not in cells:  # otherwise it was defined in a converted function, and is converted
        code, cells[_CALL] = _compiled(code), CellType(functools.partial(api.converted_call, options=options))
    closure = tuple(cells[name] for name in code.co_freevars)
    made: Any = FunctionType(code, entity.__globals__, code.co_name, entity.__defaults__, closure)
    made.__kwdefaults__ = entity.__kwdefaults__
    made.ag_module, made.ag_source_map = None, {}  # what AutoGraph reads: its lines are those of the source
    return made


@functools.cache
def _compiled(code: CodeType) -> CodeType:
    """Compile a function's source again, with its calls converted.

    Raises:
      LookupError: There is no source, it isn't a ``def``, or it isn't that of the code.
      SyntaxError: The source isn't whole.
    """
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    try:
        tree = _parsed(lines[: _last_line(code) - code.co_firstlineno + 1], code.co_firstlineno)
    except SyntaxError:  # a statement goes on after its last line that has code
        tree = _parsed(inspect.getblock(lines), code.co_firstlineno)
    if not tree.body:
        raise LookupError(f"no source: {code.co_filename}")
    function: Any = tree.body[0].body[0] if isinstance(tree.body[0], ast.If) else tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        raise LookupError(f"not a function: {ast.dump(function)}")
    function.name, function.decorator_list = _MADE, []
    function.args.defaults = [ast.copy_location(ast.Constant(None), each) for each in function.args.defaults]
    _Calls().visit(function)
    # To be compiled as free variables, they have to be local to a function around it.
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
    """Parse lines of which the first has the number ``first``."""
    # A method's source is indented, and so needs a statement before it.
    before = ["\n"] * (first - 1)
    if block and block[0][:1].isspace():
        before[-1] = "if True:\n"
    return ast.parse("".join([*before, *block]))


def _last_line(code: CodeType) -> int:
    """Return the last line that has code, of a function and of those within it."""
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
        """Leave context managers as they are, as AutoGraph does."""
        node.body = [self.visit(each) for each in node.body]
        return node
