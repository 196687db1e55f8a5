//! Event loop subscribers that are shared between threads.

use std::sync::Arc;

use event_manager::{EventOps, Events, MutEventSubscriber};
use parking_lot::Mutex;

/// A subscriber of an event loop that other threads lock too.
pub(crate) struct Subscriber<T: ?Sized = dyn MutEventSubscriber + Send>(Arc<Mutex<T>>);

impl<T: ?Sized> Subscriber<T> {
    pub(crate) fn new(subscriber: Arc<Mutex<T>>) -> Self {
        Self(subscriber)
    }
}

impl<T: MutEventSubscriber + ?Sized> MutEventSubscriber for Subscriber<T> {
    fn process(&mut self, events: Events, ops: &mut EventOps<'_>) {
        self.0.lock().process(events, ops);
    }

    fn init(&mut self, ops: &mut EventOps<'_>) {
        self.0.lock().init(ops);
    }
}
