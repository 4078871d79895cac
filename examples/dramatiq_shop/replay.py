"""Send back the dead letters whose cause is mended by now."""

from shop import bridge

for letter in bridge.dead_letters.list(error_type="external.*").letters:
    print(f"{letter.type} {letter.id}: {letter.reason}")
    bridge.dead_letters.replay(letter.id)
