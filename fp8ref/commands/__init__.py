"""What the ``fp8ref`` command offers, a module for each kind of thing it does. Each imports what it runs when it runs it."""
