"""Six kinds of text to decode, each with many variants of differing names and values.

code   a function or a class to write
edit   a module to repeat with a small change: most of the answer is in the prompt
chat   a question
prose  something to tell
json   records to extract from a text
mixed  of all five in turn
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

# Variant i takes number i modulo its length from each list below. Lengths without a common factor
# make every pair come up before one comes up again.

CODE_TASKS = (
    "Write a Python class `{name}` for a {thing}, with methods to add, remove and look up {items}, "
    "and a short example.",
    "Write a Python function that reads {items} of a {thing} from a CSV file, checks each line, "
    "and returns them as a list of `{name}` dataclasses. Only code.",
    "Complete this Python code:\n\n```python\nclass {name}:\n"
    '    """A {thing}: keeps {items} in order and finds them quickly."""\n\n'
    "    def __init__(self, capacity):\n```",
    "Write unit tests with pytest for a class `{name}` (a {thing}) whose methods are `add`, `pop`, "
    "`total` and `find`; it holds {items}.",
)
CODE_THINGS = (
    ("SeedBank", "seed bank of a botanical garden", "seed packets"),
    ("FerryQueue", "waiting line of a ferry", "vehicles"),
    ("ScoreBoard", "score board of a chess club", "players"),
    ("TideTable", "table of tides", "water levels"),
    ("PatchBay", "patch bay of a recording studio", "cables"),
    ("RecipeBox", "box of recipes", "ingredients"),
    ("SignalLog", "log of railway signals", "signal changes"),
    ("MapCache", "cache of map tiles", "tiles"),
    ("WordIndex", "index of words in a book", "page numbers"),
)

EDIT_MODULES = (
    '''"""Keeps the {things} of a {place}."""

import json
from datetime import date


class {Thing}:
    def __init__(self, name, {number}, {label}=None):
        self.name = name
        self.{number} = {number}
        self.{label} = {label} or "unknown"
        self.added = date.today()

    def describe(self):
        return f"{{self.name}}: {{self.{number}}} ({{self.{label}}})"

    def to_dict(self):
        return {{
            "name": self.name,
            "{number}": self.{number},
            "{label}": self.{label},
            "added": self.added.isoformat(),
        }}


class {Thing}Store:
    def __init__(self, path):
        self.path = path
        self.{things} = {{}}

    def add(self, {thing}):
        if {thing}.name in self.{things}:
            raise KeyError(f"{{{thing}.name}} is already there")
        self.{things}[{thing}.name] = {thing}

    def remove(self, name):
        return self.{things}.pop(name, None)

    def find(self, {label}):
        found = []
        for {thing} in self.{things}.values():
            if {thing}.{label} == {label}:
                found.append({thing})
        return found

    def total_{number}(self):
        total = 0
        for {thing} in self.{things}.values():
            total += {thing}.{number}
        return total

    def largest(self):
        return max(self.{things}.values(), key=lambda x: x.{number})

    def save(self):
        rows = [{thing}.to_dict() for {thing} in self.{things}.values()]
        with open(self.path, "w") as file:
            json.dump(rows, file, indent=2)

    def load(self):
        with open(self.path) as file:
            for row in json.load(file):
                {thing} = {Thing}(row["name"], row["{number}"], row["{label}"])
                self.{things}[{thing}.name] = {thing}
''',
    '''"""Reads {things} from text files and makes a report for the {place}."""

import csv
import sys
from collections import defaultdict

{NUMBER}_LIMIT = 400
DEFAULT_{LABEL} = "none"


def read_{things}(path):
    {things} = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            {things}.append(parse_{thing}(row))
    return {things}


def parse_{thing}(row):
    {label} = row.get("{label}") or DEFAULT_{LABEL}
    return {{
        "id": int(row["id"]),
        "{label}": {label}.strip().lower(),
        "{number}": float(row["{number}"]),
    }}


def group_by_{label}({things}):
    groups = defaultdict(list)
    for {thing} in {things}:
        groups[{thing}["{label}"]].append({thing})
    return groups


def mean_{number}({things}):
    if not {things}:
        return 0.0
    return sum({thing}["{number}"] for {thing} in {things}) / len({things})


def over_limit({things}, limit={NUMBER}_LIMIT):
    return [{thing} for {thing} in {things} if {thing}["{number}"] > limit]


def report({things}):
    lines = [f"{{len({things})}} {things}"]
    for {label}, group in sorted(group_by_{label}({things}).items()):
        mean = mean_{number}(group)
        over = len(over_limit(group))
        lines.append(f"{{{label}:<12}} {{len(group):>4}} {{mean:>8.2f}} {{over:>3}}")
    return "\\n".join(lines)


def main():
    if len(sys.argv) != 2:
        print("usage: report FILE")
        return 1
    {things} = read_{things}(sys.argv[1])
    print(report({things}))
    for {thing} in over_limit({things}):
        print("too much {number}:", {thing}["id"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
''',
    '''"""Watches the {things} of a {place} and tells who wants to know."""

import logging
import time

logger = logging.getLogger("{place}")


class {Thing}Error(Exception):
    pass


class {Thing}Watcher:
    def __init__(self, source, interval=5.0, max_{number}=90):
        self.source = source
        self.interval = interval
        self.max_{number} = max_{number}
        self.listeners = []
        self.last = {{}}
        self.running = False

    def listen(self, callback):
        self.listeners.append(callback)

    def read(self):
        {things} = self.source.fetch()
        if {things} is None:
            raise {Thing}Error("the source gave no {things}")
        return {{{thing}["{label}"]: {thing}["{number}"] for {thing} in {things}}}

    def changes(self, now):
        changed = {{}}
        for {label}, {number} in now.items():
            before = self.last.get({label})
            if before is None or before != {number}:
                changed[{label}] = (before, {number})
        return changed

    def check(self, {label}, {number}):
        if {number} > self.max_{number}:
            logger.warning("%s: %s is too much", {label}, {number})
            return False
        return True

    def step(self):
        now = self.read()
        for {label}, (before, after) in self.changes(now).items():
            ok = self.check({label}, after)
            for callback in self.listeners:
                callback({label}, before, after, ok)
        self.last = now

    def run(self, steps=None):
        self.running = True
        done = 0
        while self.running and (steps is None or done < steps):
            try:
                self.step()
            except {Thing}Error as error:
                logger.error("step %d: %s", done, error)
            done += 1
            time.sleep(self.interval)
        return done

    def stop(self):
        self.running = False
''',
)
EDIT_TASKS = (
    "Rename `{thing}` to `{other}` in this file, wherever it is a name of its own, and change "
    "nothing else.",
    "Add type hints to the parameters of the first function or method in this file that has any, "
    "and change nothing else.",
    "Add a docstring to the last function or method in this file, and change nothing else.",
    "Rename `{label}` to `{label}_name` in this file, and change nothing else.",
)
EDIT_NAMES = (
    # thing, plural, another word for it, a number of it, a label of it, where it is
    ("barrel", "barrels", "cask", "volume", "cooper", "brewery"),
    ("sensor", "sensors", "probe", "reading", "station", "greenhouse"),
    ("parcel", "parcels", "package", "weight", "courier", "depot"),
    ("violin", "violins", "fiddle", "age", "maker", "workshop"),
    ("trail", "trails", "path", "length", "region", "park"),
    ("pump", "pumps", "compressor", "pressure", "vendor", "waterworks"),
    ("loan", "loans", "credit", "amount", "branch", "library"),
    ("orchid", "orchids", "bloom", "height", "genus", "nursery"),
    ("lantern", "lanterns", "lamp", "power", "street", "harbour"),
    ("beehive", "beehives", "colony", "honey", "owner", "orchard"),
    ("kiln", "kilns", "oven", "heat", "glaze", "pottery"),
)

CHAT_QUESTIONS = (
    "What should I look at when I choose {it}?",
    "Explain to a beginner how {it} works and what usually goes wrong.",
    "I have a small budget and want {it}. Give me some advice.",
    "What are the pros and cons of {it} compared with the alternatives?",
)
CHAT_SUBJECTS = (
    "a used bicycle",
    "a sourdough starter",
    "a heat pump for an old house",
    "a password manager",
    "a secondhand piano",
    "a compost heap on a balcony",
    "a code review in a small team",
    "an e-reader for a long journey",
    "a rain barrel in the garden",
)

PROSE_TASKS = (
    "Write a short story about {who} who finds {what}.",
    "Describe the day on which {who} loses {what}.",
    "Write the opening of a novel in which {who} is handed {what} by a stranger.",
    "Tell, as a letter to a friend, how {who} came to keep {what}.",
)
PROSE_SUBJECTS = (
    ("a lighthouse keeper", "an unopened letter"),
    ("a retired tram driver", "a brass key"),
    ("a girl from the salt marshes", "a map of a city that is not there"),
    ("a clockmaker's widow", "a watch that runs backwards"),
    ("the cook of a river barge", "a caged bird"),
    ("a surveyor in the mountains", "a child's red mitten"),
    ("an organist", "a page of unknown music"),
    ("a night nurse", "a jar of black earth"),
    ("a translator of old laws", "a ring without an owner"),
)

JSON_TASKS = (
    ("Extract the people from this text as a JSON list", "name, age, city, job"),
    ("Turn this text into a JSON array of records", "name, job, city, age"),
    ("Give me only JSON: one object for each person in the text", "name, city, age, job"),
)
JSON_SENTENCES = (
    "{name}, {age}, works as a {job} in {city}.",
    "In {city} lives {name}, a {job} aged {age}.",
    "The {job} {name} turned {age} last spring and has never left {city}.",
    "{name} moved to {city} to become a {job}; that was before turning {age}.",
)
FIRST_NAMES = ("Ada", "Bruno", "Chiara", "Dmitri", "Esme", "Farid", "Greta", "Hugo", "Ines")
LAST_NAMES = ("Adler", "Brandt", "Costa", "Dahl", "Ekman", "Ferro", "Holm", "Ito", "Kovac", "Lund")
CITIES = ("Aarhus", "Bergen", "Cork", "Dijon", "Evora", "Faro", "Ghent")
JOBS = ("baker", "carpenter", "dentist", "welder", "florist", "geologist", "historian", "tailor")


def _code(i: int) -> str:
    name, thing, items = _of(CODE_THINGS, i)
    return _of(CODE_TASKS, i).format(name=name, thing=thing, items=items)


def _edit(i: int) -> str:
    thing, things, other, number, label, place = _of(EDIT_NAMES, i)
    names = {"thing": thing, "things": things, "other": other, "number": number, "label": label}
    names |= {"Thing": thing.title(), "NUMBER": number.upper(), "LABEL": label.upper()}
    module = _of(EDIT_MODULES, i).format(place=place, **names)
    task = _of(EDIT_TASKS, i).format(**names)
    return f"{task} Answer with the whole file and nothing else.\n\n```python\n{module}```"


def _chat(i: int) -> str:
    return _of(CHAT_QUESTIONS, i).format(it=_of(CHAT_SUBJECTS, i))


def _prose(i: int) -> str:
    who, what = _of(PROSE_SUBJECTS, i)
    return _of(PROSE_TASKS, i).format(who=who, what=what)


def _json(i: int) -> str:
    task, fields = _of(JSON_TASKS, i)
    people = [
        _of(JSON_SENTENCES, i + n).format(
            name=f"{_of(FIRST_NAMES, 5 * i + n)} {_of(LAST_NAMES, i + n)}",
            age=20 + (11 * i + 7 * n) % 50,
            city=_of(CITIES, i + n),
            job=_of(JOBS, 3 * i + n),
        )
        for n in range(5)
    ]
    return f"{task}, with the fields {fields}.\n\n{' '.join(people)}"


def _mixed(i: int) -> str:
    kind = _of(list(SINGLE), i)
    return SINGLE[kind](i // len(SINGLE))


def _of(choices: Sequence[T], i: int) -> T:
    return choices[i % len(choices)]


SINGLE: dict[str, Callable[[int], str]] = {
    "code": _code,
    "edit": _edit,
    "chat": _chat,
    "prose": _prose,
    "json": _json,
}
KINDS = [*SINGLE, "mixed"]
VARIANTS = 36
"""So many of each kind differ, and five times as many mixed ones."""


def prompts(kind: str, count: int, offset: int = 0) -> list[str]:
    """Return variants of a kind of text, from number `offset` on; no two are the same."""
    make = SINGLE.get(kind, _mixed)
    known = VARIANTS if kind in SINGLE else VARIANTS * len(SINGLE)
    if offset + count > known:
        raise ValueError(f"{kind} has {known} variants, not {offset + count}")
    return [make(i) for i in range(offset, offset + count)]
