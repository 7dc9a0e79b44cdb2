"""stub"""
from ebbtide.importing.answers import Answers


def answer(answers: Answers) -> None:
    raise NotImplementedError
