"""Which replica a request goes to: a pure state machine, without sockets, clock or event loop."""
