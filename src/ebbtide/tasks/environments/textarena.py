"""Games of the package `textarena` for one player: `{object: textarena, options: {env: GuessTheNumber-v0}}`."""

from __future__ import annotations

from typing import Any

from ebbtide.errors import UserError

try:
    import textarena
except ImportError:
    raise UserError(
        "`task.environment.object: textarena` needs the package textarena: pip install 'ebbtide[textarena]'"
    ) from None

PLAYER = 0


class TextArenaGame:
    """One game. Its raw form says only what is new: the policy has the rest in its context."""

    def __init__(self, env: str, **options: Any) -> None:
        raw = env if env.endswith("-raw") else f"{env}-raw"
        try:
            self._game = textarena.make(raw, **options)
            self._game.reset(num_players=1, seed=0)
        except Exception as error:  # noqa: BLE001 (foreign code: games refuse in ways of their own)
            raise UserError(f"`task.environment.options.env: {env}` is no game for one player: {error}") from None

    def reset(self, seed: int) -> str:
        self._game.reset(num_players=1, seed=seed)
        return self._new_text()

    def step(self, text: str) -> tuple[str, float, bool]:
        done, _ = self._game.step(text)
        if not done:
            return self._new_text(), 0.0, False
        rewards, info = self._game.close()
        return str(info.get(PLAYER, {}).get("reason", "")), float(rewards[PLAYER]), True

    def _new_text(self) -> str:
        _, said = self._game.get_observation()
        return "\n".join(str(message) for sender, message, *_ in said if sender != PLAYER)


make = TextArenaGame
