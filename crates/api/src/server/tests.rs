use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::thread;
use std::time::Duration;

use axum::routing::get;

use super::*;

/// A busy host runs the server's threads later than a limit of its clients.
#[test]
fn a_request_that_has_arrived_is_served_after_its_limit() {
    const LIMIT: Duration = Duration::from_millis(20);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let answers = runtime.block_on(async {
        let listen = Listen::Tcp((Ipv4Addr::LOCALHOST, 0).into());
        let listener = Listener::bind(&listen).await.unwrap();
        let Listen::Tcp(address) = listener.address().unwrap() else { panic!("no address") };
        let limits = Limits { head: LIMIT, ..Limits::default() };
        let routes = Router::new().route("/", get(async || "served"));
        let (_stop, stopped) = watch::channel(false);
        tokio::spawn(async move { run(listener, routes, &limits, stopped).await });
        // Keeps the only thread from all others.
        tokio::spawn(async {
            loop {
                thread::sleep(5 * LIMIT);
                tokio::task::yield_now().await;
            }
        });
        let ask = move || {
            let mut stream = TcpStream::connect(address)?;
            stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok::<_, std::io::Error>(answer)
        };
        let clients: Vec<_> = (0..200).map(|_| tokio::task::spawn_blocking(ask)).collect();
        let mut answers = Vec::new();
        for client in clients {
            answers.push(client.await.unwrap());
        }
        answers
    });
    for answer in answers {
        assert!(answer.as_ref().is_ok_and(|text| text.ends_with("served")), "{answer:?}");
    }
}
