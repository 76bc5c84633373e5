"""The backends. Each package offers `supports`, `forward` and `backward`; none imports another."""
