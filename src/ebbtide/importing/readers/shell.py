"""Reads the command of a shell script, as far as it can be read without running it: variables and their defaults,
arrays, quotes, and arithmetic. What a program would have to give, such as `$(nproc)`, stays unread."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbtide.importing.source import Unread

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#]")
SEPARATORS = (";", "&&", "||", "|", "&")
KEYWORDS = ("then", "do", "{", "}", "!", "time", "exec", "nohup", "sudo")
PREFIXES = ("export", "declare", "local", "readonly", "set")
PLACES = {"HOME": "~", "PWD": "."}
MARK = "\0"  # stands around what could not be read, inside a word


@dataclass
class Word:
    """A word of a command, with its expansions done."""

    text: str
    line: int

    @property
    def value(self) -> str | Unread:
        return Unread(self.text.replace(MARK, "")) if MARK in self.text else self.text


@dataclass
class Script:
    """The commands of a script, and its variables as they were at its end."""

    commands: list[list[Word]] = field(default_factory=list)
    variables: dict[str, list[str]] = field(default_factory=dict)
    """Name -> its text, or the texts of an array."""


def read_script(text: str) -> Script:
    """The commands of a script, in order. Both branches of an `if` are read; where both set a variable, the first
    counts."""
    return _Reader(text).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.place, self.line = text, 0, 1
        self.script = Script()
        self.variables: dict[str, list[str]] = self.script.variables
        self.vanished = False  # whether the word that is read had an empty array in it
        self.branches: list[tuple[bool, set[str]]] = []  # of each `if` inside which we are: in its else?, names set

    def read(self) -> Script:
        while self.place < len(self.text):
            self._command()
        return self.script

    # Characters

    def _peek(self, count: int = 1) -> str:
        return self.text[self.place : self.place + count]

    def _take(self, count: int = 1) -> str:
        taken = self._peek(count)
        self.place += count
        self.line += taken.count("\n")
        return taken

    def _until(self, end: str) -> str:
        """The text up to a closing character, which is taken as well."""
        stop = self.text.find(end, self.place)
        return self._take((len(self.text) if stop < 0 else stop) - self.place + 1)[:-1]

    def _balanced(self, opening: str, closing: str) -> str:
        """The text up to the closing character that belongs to one that was taken already."""
        depth, start = 1, self.place
        while self.place < len(self.text) and depth:
            one = self._take()
            depth += (one == opening) - (one == closing)
        return self.text[start : self.place - 1]

    # Commands

    def _command(self) -> None:
        words: list[Word] = []
        while self.place < len(self.text):
            self._skip_blanks()
            if self._peek() == "#":
                self._until_line_end()
            elif self._peek() in ("\n", "") or self._separator():
                self._take(max(1, len(self._separator() or "")))
                break
            elif self._peek() in "()":
                self._take()  # a subshell, or the end of one
            elif not words and (found := ASSIGNMENT.match(self.text, self.place)):
                self._take(len(found[0]))
                self._assign(found[1], append=bool(found[2]))
            else:
                words += self._word()
                if [word.text for word in words] and words[0].text in PREFIXES + KEYWORDS:
                    words = []
                elif words:
                    words = self._follow_branches(words)
        if words:
            self.script.commands.append(words)

    def _skip_blanks(self) -> None:
        while self._peek() in (" ", "\t", "\r") or self._peek(2) == "\\\n" or self._peek(3) == "\\\r\n":
            self._take(self._peek(3).find("\n") + 1 if self._peek() == "\\" else 1)

    def _until_line_end(self) -> None:
        while self._peek() not in ("\n", ""):
            self._take()

    def _separator(self) -> str | None:
        return next((one for one in ("&&", "||", ";", "|", "&") if self._peek(len(one)) == one), None)

    def _follow_branches(self, words: list[Word]) -> list[Word]:
        first = words[0].text
        if first == "if":
            self.branches.append((False, set()))
        elif first in ("else", "elif") and self.branches:
            self.branches[-1] = (True, self.branches[-1][1])
        elif first == "fi" and self.branches:
            self.branches.pop()
        else:
            return words
        return []

    # Variables

    def _assign(self, name: str, *, append: bool) -> None:
        if self._peek() == "(":
            self._take()
            texts: list[str] = []
            while self.place < len(self.text) and self._peek() != ")":
                self._skip_blanks()
                if self._peek() == "#":
                    self._until_line_end()
                elif self._peek() == "\n":
                    self._take()
                elif self._peek() in ("(", ";", "&", "|"):
                    self._take()  # no word begins with it
                elif self._peek() not in (")", ""):
                    texts += [word.text for word in self._word()]
            self._take()
        else:
            texts = [" ".join(word.text for word in self._word())]
        if self.branches:
            is_else, names = self.branches[-1]
            if is_else and name in names:
                return
            names.add(name)
        if append and name in self.variables:
            texts = [*self.variables[name], *texts]
        self.variables[name] = texts

    def _word(self) -> list[Word]:
        """The word that begins here. An array in it makes it several words, and an empty one makes it none."""
        line, texts, quoted, self.vanished = self.line, [""], False, False
        while (one := self._peek()) not in ("", " ", "\t", "\n", "\r", ";", "&", "|", "(", ")", "<", ">"):
            if one == "'":
                self._take()
                texts[-1] += self._until("'")
                quoted = True
            elif one == '"':
                self._take()
                quoted = True
                while self._peek() not in ('"', ""):
                    self._part(texts, quoted=True)
                self._take()
            else:
                self._part(texts, quoted=False)
        if self._peek() and self._peek() in "<>":  # a redirection: its file is no word
            while self._peek() and self._peek() in "<>&":
                self._take()
            self._skip_blanks()
            self._word()
            texts = [] if texts[-1].isdigit() else texts
        return [Word(text, line) for text in texts if text or (quoted and not self.vanished)]

    def _part(self, texts: list[str], *, quoted: bool) -> None:
        """The next character of a word, or what it expands to."""
        start, one = self.place, self._take()
        if one == "\\":
            following = self._take()
            texts[-1] += (
                "" if following == "\n" else f"\\{following}" if quoted and following not in '$`"\\' else following
            )
        elif one == "`":
            texts[-1] += f"{MARK}`{self._until('`')}`{MARK}"
        elif one == "$":
            found = self._expansion()
            self.vanished = self.vanished or not found
            if not quoted and len(found) == 1 and MARK not in found[0] and '"' not in self.text[start : self.place]:
                found = found[0].split()
            first, *others = found or [""]
            texts[-1] += first
            texts += others
        else:
            texts[-1] += one

    def _expansion(self) -> list[str]:
        if self._peek(2) == "((":
            self._take(2)
            inside = self._balanced("(", ")")
            self._take()
            return [compute(inside, self.variables)]
        if self._peek() == "(":
            self._take()
            inside = self._balanced("(", ")")
            return ["." if inside.strip() == "pwd" else f"{MARK}$({inside}){MARK}"]
        if self._peek() == "{":
            self._take()
            return self._braced(self._balanced("{", "}"))
        found = NAME.match(self.text, self.place)
        if found is None:
            return ["$"]
        return self._variable(self._take(len(found[0])))

    def _variable(self, name: str) -> list[str]:
        if name in self.variables:
            return self.variables[name][:1]
        if name in ("@", "*", "#"):
            return []
        return [PLACES[name]] if name in PLACES else [f"{MARK}${name}{MARK}"]

    def _braced(self, inside: str) -> list[str]:
        found = NAME.match(inside)
        if found is None:
            return [f"{MARK}${{{inside}}}{MARK}"]
        name, rest = found[0], inside[found.end() :]
        if rest in ("[@]", "[*]"):
            return self.variables.get(name, [])
        if not rest:
            return self._variable(name)
        if rest.startswith((":-", "-", ":=", "=")):
            default = rest.lstrip(":")[1:]
            return self.variables[name][:1] if self.variables.get(name, [""])[0] else [self._inner(default)]
        return [f"{MARK}${{{inside}}}{MARK}"]

    def _inner(self, text: str) -> str:
        """The value of the text of a default, which has quotes and variables of its own."""
        reader = _Reader(text)
        reader.variables = self.variables
        texts = [""]
        while reader.place < len(reader.text):
            if reader._peek() in ('"', "'"):
                reader._take()
            else:
                reader._part(texts, quoted=True)
        return " ".join(texts)


def compute(text: str, variables: Mapping[str, list[str]]) -> str:
    """The value of `$((text))`: integers, variables, and the four operations."""
    plain = re.sub(r"\$\{?([A-Za-z_]\w*)\}?", r"\1", text).strip()
    try:
        return str(_integer(ast.parse(plain, mode="eval").body, variables, 0))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return f"{MARK}$(({text})){MARK}"


def _integer(node: ast.expr, variables: Mapping[str, list[str]], depth: int) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name) and depth < 8:
        (text,) = variables.get(node.id) or [""]
        return _integer(ast.parse(text.strip(), mode="eval").body, variables, depth + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_integer(node.operand, variables, depth)
    if isinstance(node, ast.BinOp):
        left, right = _integer(node.left, variables, depth), _integer(node.right, variables, depth)
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            return left // right
        if isinstance(node.op, ast.Mod):
            return left % right
        for kind, result in ((ast.Add, left + right), (ast.Sub, left - right), (ast.Mult, left * right)):
            if isinstance(node.op, kind):
                return result
    raise ValueError(f"{ast.dump(node)} is not arithmetic")
