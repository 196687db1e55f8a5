//! A server that returns what it gets, for many connections.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::event::epoll;
use rustix::net::listen;

use super::site::ADDRESS;

/// Its port.
pub(super) const PORT: u16 = 7;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 4096;
const EVENTS: usize = 256;

/// The server, in a thread that ends with the test program.
#[derive(Debug)]
pub(super) struct Echo {
    open: Arc<AtomicUsize>,
}

impl Echo {
    /// Listens on [`PORT`] of [`ADDRESS`].
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind((ADDRESS, PORT)).unwrap();
        listen(&listener, BACKLOG).unwrap();
        let open = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&open);
        thread::spawn(move || serve(&listener, &count));
        Self { open }
    }

    /// The connections that are open.
    pub(super) fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }
}

fn serve(listener: &TcpListener, open: &AtomicUsize) {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let id = |descriptor: i32| u64::try_from(descriptor).unwrap();
    let add = |source: BorrowedFd<'_>| {
        let data = epoll::EventData::new_u64(id(source.as_raw_fd()));
        epoll::add(&epoll, source, data, epoll::EventFlags::IN).unwrap();
    };
    add(listener.as_fd());
    let mut connections: HashMap<u64, TcpStream> = HashMap::new();
    let mut events = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
    loop {
        let (events, _) = epoll::wait(&epoll, &mut events, None).unwrap();
        for event in events {
            let from = event.data.u64();
            if from == id(listener.as_raw_fd()) {
                let (connection, _) = listener.accept().unwrap();
                connection.set_nonblocking(true).unwrap();
                add(connection.as_fd());
                connections.insert(id(connection.as_raw_fd()), connection);
            } else if !connections.get(&from).is_some_and(returns) {
                connections.remove(&from);
            }
            open.store(connections.len(), Ordering::Relaxed);
        }
    }
}

/// Returns what there is, and whether the connection goes on.
fn returns(mut connection: &TcpStream) -> bool {
    let mut bytes = [0; 64];
    match connection.read(&mut bytes) {
        Ok(0) => false,
        Ok(len) => connection.write_all(&bytes[..len]).is_ok(),
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    }
}
