"""The callbacks for trainers: bits, what is undone, what is refused."""
