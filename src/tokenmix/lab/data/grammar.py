"""A small grammar that writes English sentences and their Spanish translations.

Articles and adjectives agree with their noun in gender and number, adjectives follow the noun, and "to be" is *ser* for
what something is and *estar* for the state it is in. Every English sentence has one translation.
"""

from __future__ import annotations

from typing import NamedTuple


class Noun(NamedTuple):
    """A noun: English singular and plural, Spanish singular and plural, and its gender, "m" or "f"."""

    one: str
    many: str
    uno: str
    muchos: str
    gender: str


class Adjective(NamedTuple):
    """An adjective: English, and its Spanish forms (masculine, feminine, each in the plural)."""

    word: str
    m: str
    f: str
    ms: str
    fs: str

    def form(self, noun: Noun, *, plural: bool) -> str:
        """Return the form that agrees with a noun."""
        return getattr(self, noun.gender + ("s" if plural else ""))


class Verb(NamedTuple):
    """A verb in the past: English, Spanish for one and for several subjects, and the things that it is done to."""

    past: str
    uno: str
    muchos: str
    objects: tuple[Noun, ...]


def _nouns(text: str) -> dict[str, Noun]:
    rows = [Noun(*line.split()) for line in text.strip().splitlines()]
    return {noun.one: noun for noun in rows}


def _adjectives(text: str) -> tuple[Adjective, ...]:
    return tuple(Adjective(*line.split()) for line in text.strip().splitlines())


PEOPLE = _nouns("""
boy boys niño niños m
girl girls niña niñas f
teacher teachers maestro maestros m
queen queens reina reinas f
""")
ANIMALS = _nouns("""
cat cats gato gatos m
dog dogs perro perros m
cow cows vaca vacas f
bird birds pájaro pájaros m
""")
THINGS = _nouns("""
ball balls bola bolas f
house houses casa casas f
book books libro libros m
door doors puerta puertas f
window windows ventana ventanas f
car cars coche coches m
table tables mesa mesas f
hat hats sombrero sombreros m
box boxes caja cajas f
""")
FOOD = _nouns("""
milk - leche - f
coffee - café - m
juice - jugo - m
soup - sopa - f
bread - pan - m
apple apples manzana manzanas f
egg eggs huevo huevos m
""")
COLOURS = _adjectives("""
black negro negra negros negras
white blanco blanca blancos blancas
red rojo roja rojos rojas
yellow amarillo amarilla amarillos amarillas
blue azul azul azules azules
green verde verde verdes verdes
""")
SIZES = _adjectives("""
small pequeño pequeña pequeños pequeñas
big grande grande grandes grandes
""")
MOODS = _adjectives("""
tired cansado cansada cansados cansadas
happy contento contenta contentos contentas
sick enfermo enferma enfermos enfermas
""")
STATES = _adjectives("""
clean limpio limpia limpios limpias
dirty sucio sucia sucios sucias
broken roto rota rotos rotas
""")
TASTES = _adjectives("""
cold frío fría fríos frías
hot caliente caliente calientes calientes
""")
PHRASES = (
    ("You are welcome", "De nada"),
    ("Thank you", "Gracias"),
    ("Good morning", "Buenos días"),
    ("Good night", "Buenas noches"),
    ("See you tomorrow", "Hasta mañana"),
    ("How are you", "Cómo estás"),
    ("I am sorry", "Lo siento"),
)


def _pick_nouns(nouns: dict[str, Noun], names: str) -> tuple[Noun, ...]:
    return tuple(nouns[name] for name in names.split())


DRANK = Verb("drank", "bebió", "bebieron", _pick_nouns(FOOD, "milk coffee juice soup"))
ATE = Verb("ate", "comió", "comieron", _pick_nouns(FOOD, "bread apple egg"))
SAW = Verb("saw", "vio", "vieron", (*_pick_nouns(THINGS, "ball house car"), *ANIMALS.values()))
BOUGHT = Verb("bought", "compró", "compraron", _pick_nouns(THINGS, "ball house book car hat table"))
OPENED = Verb("opened", "abrió", "abrieron", _pick_nouns(THINGS, "door window book box"))


def sentence_pairs() -> list[tuple[str, str]]:
    """Return the sentences of the grammar, English and Spanish: always the same list, no English sentence twice.

    They have no punctuation, so that each word is one token for a tokenizer that splits at spaces.
    """
    return list(dict([*PHRASES, *_descriptions(), *_actions()]).items())


def _descriptions() -> list[tuple[str, str]]:
    """Write "The ball is blue" and "The black cats are tired"."""
    kinds = (
        (PEOPLE, SIZES, MOODS, ()),
        (ANIMALS, (*COLOURS[:2], *SIZES), MOODS, COLOURS[:2]),
        (THINGS, (*COLOURS, *SIZES), STATES, COLOURS),
        (FOOD, (), TASTES, ()),
    )
    pairs = []
    for nouns, lasting, passing, marks in kinds:
        for noun in nouns.values():
            for plural in (False, True) if noun.many != "-" else (False,):
                for mark in (None, *marks):
                    subject = _noun_phrase(noun, mark, plural=plural)
                    verbs = ("are", "son", "están") if plural else ("is", "es", "está")
                    told = [(a, verbs[2]) for a in passing]
                    told += [(a, verbs[1]) for a in lasting if mark is None or a not in COLOURS]
                    pairs += [
                        _join_parts(subject, (verbs[0], verb), (a.word, a.form(noun, plural=plural)))
                        for a, verb in told
                    ]
    return pairs


def _actions() -> list[tuple[str, str]]:
    """Write "The black cat drank the milk" and "The small girls bought the red hats"."""
    pairs = []
    for nouns, marks, verbs in (
        (PEOPLE, SIZES, (DRANK, ATE, SAW, BOUGHT, OPENED)),
        (ANIMALS, (*COLOURS[:2], *SIZES), (DRANK, ATE, SAW)),
    ):
        for noun in nouns.values():
            for plural in (False, True):
                for mark in (None, *marks):
                    subject = _noun_phrase(noun, mark, plural=plural)
                    for verb in verbs:
                        done = (verb.past, verb.muchos if plural else verb.uno)
                        pairs += [
                            _join_parts(subject, done, what) for thing in verb.objects for what in _objects(thing)
                        ]
    return pairs


def _objects(thing: Noun) -> list[tuple[str, str]]:
    """Return what a verb is done to: "the red hat" without a capital, with and without an adjective, one and many."""
    marks = TASTES if thing.one in FOOD and thing.many == "-" else COLOURS[2:4] if thing.one in THINGS else ()
    phrases = [_noun_phrase(thing, mark, plural=False) for mark in (None, *marks)]
    phrases += [_noun_phrase(thing, None, plural=True)] if thing.many != "-" else []
    lowered = [("the" + english.removeprefix("The"), spanish[0].lower() + spanish[1:]) for english, spanish in phrases]
    if thing.one not in ANIMALS:
        return lowered
    return [(english, f"a {spanish}".replace("a el ", "al ")) for english, spanish in lowered]  # the personal a


def _noun_phrase(noun: Noun, mark: Adjective | None, *, plural: bool) -> tuple[str, str]:
    """Return "The black cats" and "Los gatos negros"."""
    article = {"m": ("El", "Los"), "f": ("La", "Las")}[noun.gender][plural]
    english, spanish = ["The", noun.many if plural else noun.one], [article, noun.muchos if plural else noun.uno]
    if mark is not None:
        english.insert(1, mark.word)
        spanish.append(mark.form(noun, plural=plural))
    return " ".join(english), " ".join(spanish)


def _join_parts(*parts: tuple[str, str]) -> tuple[str, str]:
    """Join the parts of a sentence, which both languages have in the same order."""
    return " ".join(part[0] for part in parts), " ".join(part[1] for part in parts)
