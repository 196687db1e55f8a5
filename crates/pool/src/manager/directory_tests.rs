use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{FindManagerError, ManagerDirectory, RemoveError};
use crate::{
    Access, Client, ClientError, CreateOptions, GRANULE, MappedMedium, Pool, Server, ServerError,
};

/// A pool in a file with the snapshots `ice` and `snow`.
fn medium(path: &Path) -> PathBuf {
    let medium = MappedMedium::create_file(path, 8 * GRANULE).unwrap();
    let pool = Pool::create(Arc::new(medium), &CreateOptions::default()).unwrap();
    for name in ["ice", "snow"] {
        pool.allocate(name, GRANULE, 0).unwrap().publish().unwrap();
    }
    path.to_owned()
}

fn open(path: &Path) -> Pool {
    Pool::open(Arc::new(MappedMedium::open(path, Access::Write).unwrap())).unwrap()
}

#[test]
fn without_a_manager_a_snapshot_is_removed_on_the_medium() {
    let folder = tempfile::tempdir().unwrap();
    let directory = ManagerDirectory::new(folder.path().join("run"));
    let medium = medium(&folder.path().join("pool"));
    assert!(directory.connect(&medium).unwrap().is_none());
    assert_eq!(directory.remove_snapshot(&medium, "snow").unwrap(), GRANULE);
    let again = directory.remove_snapshot(&medium, "snow").unwrap_err();
    assert!(matches!(again, RemoveError::Reclaim(_)) && again.is_unknown(), "{again}");
    assert_eq!(open(&medium).names(), ["ice"]);
}

#[test]
fn a_manager_is_found_by_its_medium_or_its_socket() {
    let folder = tempfile::tempdir().unwrap();
    let directory = ManagerDirectory::new(folder.path().to_owned());
    let medium = medium(&folder.path().join("pool"));
    let socket = directory.socket_of(&medium).unwrap().unwrap();
    assert_eq!(socket.parent(), Some(folder.path()));
    let server = Server::start(&socket, open(&medium)).unwrap();
    assert_eq!(directory.socket_of(&socket).unwrap(), None);

    let pin = server.pool().pin("snow").unwrap();
    assert_eq!(directory.remove_snapshot(&medium, "snow").unwrap(), 0);
    drop(pin);
    assert_eq!(directory.remove_snapshot(&socket, "ice").unwrap(), GRANULE);
    assert_eq!(server.pool().list().extents, []);
    let error = directory.remove_snapshot(&socket, "ice").unwrap_err();
    assert!(error.is_unknown(), "{error}");
    let written = server.pool().allocate("ice", GRANULE, 0).unwrap();
    let error = directory.remove_snapshot(&socket, "ice").unwrap_err();
    assert!(!error.is_unknown(), "{error}");
    drop(written);

    let nothing = directory.connect(&folder.path().join("nothing")).unwrap_err();
    let gone = matches!(nothing, FindManagerError::Manager(ClientError::NotRunning(_)));
    assert!(gone, "{nothing}");
}

#[test]
fn a_connected_socket_serves_a_client() {
    let folder = tempfile::tempdir().unwrap();
    let medium = medium(&folder.path().join("pool"));
    let socket = folder.path().join("pool.sock");
    let _server = Server::start(&socket, open(&medium)).unwrap();
    let mut connected = Client::connect(&socket).unwrap();
    let generation = connected.snapshot("snow").unwrap().extent().generation;
    let mut client = Client::from_stream(connected.into_stream());
    assert_eq!(client.path(), socket);
    // The grants of the connection stay valid.
    client.release(generation).unwrap();
    assert!(client.snapshot("ice").is_ok());

    let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(other);
    let error = Client::from_stream(one).describe().unwrap_err();
    assert!(matches!(error, ClientError::Closed(_)), "{error}");
}

#[test]
fn sockets_of_killed_managers_are_swept() {
    let folder = tempfile::tempdir().unwrap();
    let directory = ManagerDirectory::new(folder.path().to_owned());
    let dead = folder.path().join("pool-1-2.sock");
    let foreign = folder.path().join("other.sock");
    for path in [&dead, &foreign] {
        drop(std::os::unix::net::UnixListener::bind(path).unwrap());
    }
    std::fs::write(folder.path().join("pool-notes.sock"), "no socket").unwrap();
    let medium = medium(&folder.path().join("pool"));
    let socket = directory.socket_of(&medium).unwrap().unwrap();
    let _server = Server::start(&socket, open(&medium)).unwrap();
    directory.sweep();
    assert!(!dead.exists() && foreign.exists() && socket.exists());
    assert!(directory.connect(&medium).unwrap().is_some());
}

/// A link in place of the socket or of the folder would lead clients to another process.
#[test]
fn symbolic_links_to_a_manager_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    let directory = ManagerDirectory::new(run.clone());
    let medium = medium(&folder.path().join("pool"));
    let socket = directory.socket_of(&medium).unwrap().unwrap();
    let named = folder.path().join("named.sock");
    let mut server = Server::start(&named, open(&medium)).unwrap();
    symlink(&named, &socket).unwrap();
    let error = directory.connect(&medium).unwrap_err();
    assert!(matches!(&error, FindManagerError::Foreign(path) if *path == socket), "{error}");
    assert!(matches!(server.also_at(&socket), Err(ServerError::NotASocket(_))));

    // A manager that was given another socket serves on both.
    std::fs::remove_file(&socket).unwrap();
    server.also_at(&socket).unwrap();
    assert!(directory.connect(&medium).unwrap().is_some());
    assert!(Client::connect(&named).unwrap().snapshot("ice").is_ok());

    let link = folder.path().join("link");
    symlink(&run, &link).unwrap();
    let linked = ManagerDirectory::new(link);
    let error = linked.socket_of(&medium).unwrap_err();
    assert!(matches!(error, FindManagerError::Directory { .. }), "{error}");
    drop(server);
    assert!(!socket.exists() && !named.exists());
}
