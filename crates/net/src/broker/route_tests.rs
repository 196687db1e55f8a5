use std::net::Ipv4Addr;

use rustix::net::socketpair;

use super::*;

const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));
const NLMSG_ERROR: u16 = 2;
const RTN_LOCAL: u8 = 2;

/// Whether an address is local if the kernel answers with these messages.
fn answered(answers: &[Vec<u8>]) -> bool {
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let (ours, kernel) = pair.unwrap();
    for answer in answers {
        send(&kernel, answer, SendFlags::empty()).unwrap();
    }
    // The end of the answers ends the wait at once.
    rustix::net::shutdown(&kernel, rustix::net::Shutdown::Write).unwrap();
    Routes { socket: OnceCell::from(ours), number: Cell::new(0) }.is_local(ADDRESS)
}

fn message(kind: u16, number: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(NLMSG_HEADER + body.len()).unwrap();
    [&len.to_ne_bytes()[..], &kind.to_ne_bytes(), &[0; 2], &number.to_ne_bytes(), &[0; 4], body]
        .concat()
}

fn route(number: u32, kind: u8) -> Vec<u8> {
    let mut body = [0; RTMSG];
    body[RTM_TYPE] = kind;
    message(RTM_NEWROUTE, number, &body)
}

fn error(errno: Errno) -> Vec<u8> {
    message(NLMSG_ERROR, 1, &(-errno.raw_os_error()).to_ne_bytes())
}

#[test]
fn the_type_of_the_route_decides() {
    assert!(!answered(&[route(1, RTN_UNICAST)]));
    assert!(answered(&[route(1, RTN_LOCAL)]));
    assert!(!answered(&[route(1, *RTN_REJECTED.start())]));
    assert!(!answered(&[error(Errno::NETUNREACH)]));
    assert!(answered(&[route(0, RTN_UNICAST), route(1, RTN_LOCAL)]), "the first one is late");
}

#[test]
fn without_an_answer_an_address_is_the_hosts_own() {
    assert!(answered(&[error(Errno::PERM)]));
    assert!(answered(&[]));
    assert!(answered(&[message(RTM_NEWROUTE, 1, &[0; RTM_TYPE])]), "it is cut off");
    assert!(answered(&[message(NLMSG_ERROR, 1, &[])]), "it is cut off");
    let null = std::fs::File::open("/dev/null").unwrap();
    let routes = Routes { socket: OnceCell::from(OwnedFd::from(null)), number: Cell::new(0) };
    assert!(routes.is_local(ADDRESS), "nothing can be asked");
}
