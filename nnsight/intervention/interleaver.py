"""The run of a model with its blocks, for those who write tracers, backends and properties of their own.

A run takes its turns between greenlets on one thread, see :mod:`nnsight.runtime.interleaver`; documents of earlier versions
describe threads that talk through queues. All documented members are here. What they mean in a run of greenlets:

======================================  ===============================================================================
``Interleaver.handle``                  offers a value to all blocks that wait for it, and counts the passage
``Interleaver.batcher``                 the value where the model stands and the rows of each block; a look at the run,
                                        which narrows by itself: a class of one's own is refused
``Interleaver.wrap_module``             intercepts a module that is no part of the model, until the run ends
``Interleaver.check_dangling_mediators``  ends the blocks after the model, which raises for those that still wait
``Interleaver.check_cache_full``        warns of modules that a cache was to keep and that were not called; for a driver to
                                        call, as reading such a module from the cache raises anyway
``Interleaver.defer_exceptions``        what a block raises ends that block only, and is its ``deferred_exception``
``Mediator.worker``                     a greenlet
``Mediator.history``                    the passages of the run, which all its blocks share
``Mediator.hooks``                      what the author of a property registers for this run; empty otherwise
``Mediator.send``                       calls the method for the event; nothing travels
``Mediator.respond``                    gives the block the value it waits for, and runs it until it waits again
``Mediator.event_queue``                the event that the block waits with, which stays until the block is answered
``Mediator.response_queue``             what is put in, the block gets at once; always empty
``Mediator.handle_value_event``,        answers the block with ``batcher.current_value``, if the driver stands where the
``handle_swap_event``,                  block waits; the block does what it waits to do
``handle_skip_event``
``Mediator.handle_barrier_event``       releases blocks that wait by ``send(Events.BARRIER, None)``
``Mediator.handle_end_event``,          ends the block
``handle_exception_event``
``Mediator.push``, ``pull``             variables that a block only reads are shared anyway; ``pull`` fetches those that it
                                        assigns and has not assigned yet
``Mediator.cross_invoker``              whether the block shows its variables to others
``Mediator.user_cache``                 the caches of the block, while the run lasts
``Mediator.skip_container``             what the block has the modules return that are about to be called
``Mediator.args``                       what the block's function is called with, if that is set before the run
``Mediator.all_stop``                   how often the block runs, each time for the next passage of its locations
``Mediator.original_globals``           the globals of the block's function, which nobody changes
``Mediator.lock``                       0, as only one side ever runs
``with mediator:``                      ends the block on leaving, for one that was started by ``mediator.start(run)``
``Value``                               a box for one value, between threads of one's own
``Cancelation``                         what ends a block from outside: ``greenlet.GreenletExit``, no ``Exception``
``SkipException``                       raised in a block at a module's input: skips the module and ends the block
======================================  ===============================================================================
"""

from typing import TypeVar

from greenlet import GreenletExit as Cancelation

from ..eproperty import IEnvoy, eproperty
from ..runtime.errors import MissedProviderError, OutOfOrderError
from ..runtime.interleaver import Interleaver
from ..runtime.mediator import Mediator
from ..runtime.queues import Value
from ..runtime.surface import EarlyStopException, Events, SkipException

T = TypeVar("T")

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
    "T",
    "Value",
    "eproperty",
]
