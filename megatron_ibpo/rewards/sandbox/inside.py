"""The code that runs in the sandbox, around the program.

It imports nothing of the package and, until it must, little of the standard library: that would take longer
than most programs.

Started as `python -c STUB RUNNER PROGRAM READY HIGHEST UID MODE ARGUMENTS…`. The first three are descriptors:
of this module, compiled, of the program's text, and of a pipe that is told when the sandbox is ready. HIGHEST
is the highest descriptor that may be open; all but the standard ones are closed. Modes:

- `program FIRST`: the program as if it had been started by itself; stdin and stdout are its own. FIRST is
  Python that runs in its namespace before it.
- `calls FIRST NAME`: calls one function. Each line of stdin is a JSON list of arguments, each line of stdout
  a JSON answer: [true, result] or [false, what was raised].
- `serve`: holds the program for a `check` in another sandbox, which sends requests over a socket pair
  (stdin).
- `check ENTRY_POINT`: runs tests written in Python. Here PROGRAM is the text of the tests, and whatever they
  need of the program is requested from `serve`. Prints "passed" at the end.
- `check_here ENTRY_POINT SERVE`: the same with both in one sandbox, on a server. SERVE is the text of a
  script that serves the program, and is started as another process.
"""

import builtins
import os
import sys

TYPE_CHECKING = False  # the import of typing takes as long as some programs
if TYPE_CHECKING:
    import symtable
    from collections.abc import Callable, Iterator
    from types import ModuleType
    from typing import Any

PASSED = "passed"
CHANGED = "__changed__"
"""Name under which tests find a call's changes to its arguments; see `rewards.rebinding`."""
STUB = "import marshal,sys;exec(marshal.load(open(int(sys.argv[1]),'rb',closefd=False)))"
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration)


def main() -> None:
    """Run the mode that the command line names."""
    program_fd, ready_fd, highest_fd, uid = map(int, sys.argv[2:6])
    mode, *arguments = sys.argv[6:]
    sys.argv = ["program.py"]
    with open(program_fd, encoding="utf-8", errors="surrogatepass") as file:
        source = file.read()
    if uid >= 0:
        _give_up_root(uid)
    os.write(ready_fd, b"1")
    os.closerange(3, highest_fd + 1)
    run(mode, source, *arguments)


def run(mode: str, source: str, *arguments: str) -> None:
    """Run the mode on a program or, for `check`, on tests."""
    sys.set_int_max_str_digits(0)  # integers of any length pass as JSON; limits of time hold
    if mode == "program":
        load(source, "__main__", *arguments)
    elif mode == "calls":
        _answer_calls(source, *arguments)
    elif mode == "serve":
        _serve(source)
    elif mode == "check":
        _check(source, *arguments)
    elif mode == "check_here":
        _check_here(source, *arguments)


def _give_up_root(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def load(source: str, name: str, first: str = "") -> "ModuleType":
    """Run a program as a module of this name, and return the module."""
    vars(builtins).update(
        exit=sys.exit, quit=sys.exit
    )  # as the module `site` does, which takes time to start
    module = type(sys)(name)
    sys.modules[name] = module
    exec(first, vars(module))
    exec(source, vars(module))  # `compile` would first make the types of `ast`, a tenth of a sandbox's time
    return module


def _answer_calls(source: str, first: str, name: str) -> None:
    import json

    requests = sys.stdin.buffer.read().splitlines()
    answers = _private_stdout()
    module = load(source, "program", first)
    owner = module.Solution() if hasattr(module, "Solution") else module
    for request in requests:
        try:
            answer = json.dumps([True, getattr(owner, name)(*json.loads(request))])
        except Exception as error:
            answer = json.dumps([False, type(error).__name__])
        answers.write(answer.encode() + b"\n")
    os._exit(0)


def _private_stdout() -> "Any":
    """Return stdout for this runner alone; the program reads and prints nothing."""
    ours = open(os.dup(1), "wb", buffering=0)  # noqa: SIM115
    _standard_to_nowhere(0, 1)
    return ours


def _standard_to_nowhere(*descriptors: int) -> None:
    nowhere = os.open("/dev/null", os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)


# ------------------------------------------------------------------------------- values between two sandboxes


class JsonCodec:
    """A codec of values as JSON: data goes by value, anything else as a reference that its owner keeps."""

    def __init__(self, refer: "Callable[[Any], int]", resolve: "Callable[[int], Any]"):
        self._refer, self._resolve = refer, resolve

    def pack(self, value: "Any") -> "Any":
        """Return the value as JSON. Subclasses of data become the data itself, so that no `__eq__` of the
        program's is ever called."""
        if value is None or value is True or value is False:
            return value
        if isinstance(value, (int, float, str)):
            return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
        if isinstance(value, list):
            return [self.pack(item) for item in value]
        for kind in (tuple, set, frozenset):
            if isinstance(value, kind):
                return {kind.__name__: [self.pack(item) for item in value]}
        if isinstance(value, dict):
            return {"dict": [[self.pack(key), self.pack(item)] for key, item in value.items()]}
        if isinstance(value, (bytes, bytearray)):
            return {"bytes": bytes(value).hex()}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        return {"reference": self._refer(value)}

    def unpack(self, packed: "Any") -> "Any":
        if isinstance(packed, list):
            return [self.unpack(item) for item in packed]
        if not isinstance(packed, dict):
            return packed
        ((kind, content),) = packed.items()
        if kind == "reference":
            return self._resolve(content)
        if kind == "dict":
            return {self.unpack(key): self.unpack(item) for key, item in content}
        if kind == "bytes":
            return bytes.fromhex(content)
        if kind == "complex":
            return complex(*content)
        makers: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
        return makers[kind](map(self.unpack, content))


def _serve(source: str) -> None:
    """Hold the program; answer [true, result, arguments after the call] or [false, exception, message]."""
    import json

    channel = open(os.dup(0), "wb", buffering=0)  # noqa: SIM115
    requests = open(os.dup(0), encoding="utf-8")  # noqa: SIM115
    _standard_to_nowhere(0, 1, 2)  # its prints go nowhere, and a full pipe would stop it
    objects: list[Any] = []

    def refer(value: "Any") -> int:
        objects.append(value)
        return len(objects) - 1

    plain = JsonCodec(refer, lambda number: objects[number])
    module = load(source, "program")
    for line in requests:
        action, *packed = json.loads(line)
        try:
            arguments = [plain.unpack(item) for item in packed]
            answer = [True, *map(plain.pack, _done(module, action, arguments))]
            text = json.dumps(answer)
        except Exception as error:
            text = json.dumps([False, type(error).__name__, str(error)[:500]])
        channel.write(text.encode() + b"\n")


def _done(module: "ModuleType", action: str, arguments: "list[Any]") -> "tuple[Any, Any]":
    """Return (result, the arguments of a call as they are after it)."""
    if action == "global":
        (name,) = arguments
        if not hasattr(module, name) and hasattr(module, "Solution"):
            return getattr(module.Solution(), name), None
        return getattr(module, name), None
    if action == "attribute":
        owner, name = arguments
        return getattr(owner, name), None
    if action == "list":
        return list(arguments[0]), None
    function, positional, named = arguments
    return function(*positional, **named), positional


class Remote:
    """An object of the program that is not plain data. It can be called, read and iterated, and equals
    nothing but itself."""

    def __init__(self, ask: "Callable[..., list[Any]]", number: int, changes: "Changes"):
        self.__dict__.update(_ask=ask, _number=number, _changes=changes)

    def __call__(self, *positional: "Any", **named: "Any") -> "Any":
        result, changed_arguments = self._ask("call", self, list(positional), named)
        for argument, changed_argument in zip(positional, changed_arguments, strict=True):
            self._changes.note(argument, changed_argument)
        return result

    def __getattr__(self, name: str) -> "Any":
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("attribute", self, name)[0]

    def __iter__(self) -> "Iterator[Any]":
        return iter(self._ask("list", self)[0])


class Changes:
    """Arguments that calls changed in place. The tests' own objects stay as they are, since tests may loop
    over them or compare with them."""

    def __init__(self) -> None:
        self._changed: dict[int, tuple[Any, Any]] = {}
        """Argument's identity → (argument, changed copy). The argument is kept so that no other object gets
        its identity."""

    def note(self, value: "Any", changed_value: "Any") -> None:
        if type(value) is type(changed_value) and isinstance(value, (list, dict, set)):
            if value != changed_value:
                self._changed[id(value)] = value, changed_value
            else:
                self._changed.pop(id(value), None)

    def changed(self, value: "Any") -> "Any":
        """Return the value, or what it contains, as the last call left it."""
        if id(value) in self._changed:
            return self._changed[id(value)][1]
        if type(value) in (list, tuple) and any(id(item) in self._changed for item in value):
            return type(value)(map(self.changed, value))
        if type(value) is dict and any(id(item) in self._changed for item in value.values()):
            return {key: self.changed(item) for key, item in value.items()}
        return value


def _check(tests: str, entry_point: str = "") -> None:
    """Run tests in this process against a program in another one. It returns plain values, and can reach
    neither the tests nor what they compare with."""
    import json

    channel = open(0, "wb", buffering=0, closefd=False)  # noqa: SIM115
    replies = open(os.dup(0), encoding="utf-8")  # noqa: SIM115
    changes = Changes()
    plain = JsonCodec(lambda value: value._number, lambda number: Remote(ask, number, changes))

    def ask(action: str, *arguments: "Any") -> "list[Any]":
        channel.write(json.dumps([action, *map(plain.pack, arguments)]).encode() + b"\n")
        line = replies.readline()
        if not line:
            raise SystemExit("the program has ended")
        succeeded, *content = json.loads(line)
        if not succeeded:
            raise _exception(*content)
        return [plain.unpack(item) for item in content]

    namespace: dict[str, Any] = {"__name__": "tests", CHANGED: changes.changed}
    defined_names = _globals_of_functions(tests)
    for name in sorted(needed_names(tests) | ({entry_point} if entry_point else set())):
        if name in sys.stdlib_module_names:
            namespace[name] = __import__(name)
            continue
        try:
            namespace[name] = ask("global", name)[0]
        except Exception:
            if name not in defined_names:  # otherwise the tests may assign it before they use it
                raise
    candidate = namespace.get(entry_point)
    exec(tests, namespace)
    if entry_point:
        namespace["check"](candidate)
    ask("list", [])  # tests that expect any exception must not take the end of the program for one
    print(PASSED)


def _check_here(tests: str, entry_point: str, serve: str) -> None:
    import socket
    import subprocess

    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, "-c", serve], stdin=theirs.fileno(), stdout=subprocess.DEVNULL
    ) as process:
        theirs.close()
        os.dup2(ours.fileno(), 0)
        try:
            _check(tests, entry_point)
        finally:
            process.kill()


def _exception(kind: str, message: str) -> Exception:
    """Return an exception of the program's, so that tests may expect it. It never ends the tests or one of
    their loops: what `all` and `map` take for the end of a list is an ordinary error here."""
    exception_type = getattr(builtins, kind, None)
    if (
        isinstance(exception_type, type)
        and issubclass(exception_type, Exception)
        and exception_type not in _ENDS_OF_LOOPS
    ):
        return exception_type(message)
    return RuntimeError(f"{kind}: {message}")


def needed_names(tests: str) -> set[str]:
    """Return the global names that tests use and do not define. Raises SyntaxError if they are not Python."""
    top, *inner = _scopes(tests)
    used = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    used |= {
        symbol.get_name()
        for table in inner
        for symbol in table.get_symbols()
        if symbol.is_referenced() and symbol.is_global()
    }
    defined = {
        symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    }
    return used - defined - set(vars(builtins)) - {"__name__", CHANGED}


def _globals_of_functions(tests: str) -> set[str]:
    """Return the global names that functions of the tests assign."""
    symbols = [symbol for table in _scopes(tests) for symbol in table.get_symbols()]
    return {s.get_name() for s in symbols if s.is_declared_global() and s.is_assigned()}


def _scopes(tests: str) -> "list[symtable.SymbolTable]":
    """Return the tables of the module and of all scopes in it, the module's first."""
    import symtable

    tables = [symtable.symtable(tests, "tests.py", "exec")]
    for table in tables:
        tables += table.get_children()
    return tables


if __name__ == "__main__":
    main()
