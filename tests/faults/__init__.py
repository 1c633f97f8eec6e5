"""What goes wrong, and what must happen then: one test for each way, each in a process of its own."""
