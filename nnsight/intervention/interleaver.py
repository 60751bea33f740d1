"""The run of a model with its blocks, for those who write tracers, backends and properties of their own.

A run takes its turns between greenlets on one thread, see :mod:`nnsight.runtime.interleaver`; documents of earlier versions
describe threads that talk through queues. What a member means here:

======================================  ===============================================================================
``Interleaver.handle``                  offers a value to all blocks that wait for it, and counts the passage
``Interleaver.batcher``                 ``None``; a mediator knows its rows: ``mediator.batch_group``
``Interleaver.check_dangling_mediators``  ends the blocks after the model, which raises for those that still wait
``Mediator.worker``                     a greenlet
``Mediator.history``                    the passages of the run, which all its blocks share
``Mediator.send``                       calls the method for the event; nothing travels
``Mediator.respond``                    gives the block the value it waits for, and runs it until it waits again
``Mediator.hooks``                      what the author of a property registers for this run; empty otherwise
``Cancelation``                         what ends a block from outside: ``greenlet.GreenletExit``, no ``Exception``
``SkipException``                       raised in a block at a module's input: skips the module and ends the block
======================================  ===============================================================================

Not present:

======================================  ===============================================================================
``Value``, ``event_queue``,             a request is a switch of greenlets; there is nothing to put into a queue, and
``response_queue``, ``lock``            only one side ever runs
``handle_value_event`` and the others   a block asks by calling ``request``, ``swap``, ``skip``, which do the work
``pull``                                what others have pushed is in variables that the blocks share
``wrap_module``                         modules are intercepted for the time of a run, not wrapped
``skip_container``                      ``Interleaver.skips``
``user_cache``, ``set_user_cache``,     a cache observes locations of the run, ``Interleaver.observe``; reading a module
``check_cache_full``                    that it missed raises
``all_stop``, ``args``                  a block runs once, and has no arguments
``cross_invoker``, ``original_globals``  which variables blocks share is settled when they are captured
``defer_exceptions``,                   an error leaves the block at once; it is kept in ``Interleaver.failure`` in case
``deferred_exception``                  the model's code catches it
======================================  ===============================================================================
"""

from greenlet import GreenletExit as Cancelation

from ..eproperty import IEnvoy, eproperty
from ..runtime.errors import MissedProviderError, OutOfOrderError
from ..runtime.interleaver import Interleaver
from ..runtime.mediator import Mediator
from ..runtime.surface import EarlyStopException, Events, SkipException

#: Begins the names that this package puts into the code of a block, such as ``__nnsight_block__``.
NNSIGHT_PREFIX = "__nnsight"

__all__ = [
    "NNSIGHT_PREFIX",
    "Cancelation",
    "EarlyStopException",
    "Events",
    "IEnvoy",
    "Interleaver",
    "Mediator",
    "MissedProviderError",
    "OutOfOrderError",
    "SkipException",
    "eproperty",
]
