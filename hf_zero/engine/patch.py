"""What the engine puts onto a user's objects, so that it can be taken off again."""


class Patch:
    """An attribute of one object that stands before its class's, or one of its own, until it is removed.

    Args:
        owner: the object.
        name (`str`): the attribute.
        value: what it is from now on.
    """

    def __init__(self, owner, name: str, value):
        self._owner, self._name = owner, name
        self._before = {key: own for key, own in owner.__dict__.items() if key == name}
        owner.__dict__[name] = value

    def remove(self) -> None:
        """Several on one attribute are removed in the opposite order."""
        self._owner.__dict__.pop(self._name, None)
        self._owner.__dict__.update(self._before)


class NodeHook:
    """A hook on a node of autograd's graph, which lives as long as somebody holds it.

    Args:
        node: the node.
        hook: called when it has run.
    """

    def __init__(self, node, hook):
        self.node = node
        self._handle = node.register_hook(hook)

    def remove(self) -> None:
        self._handle.remove()
