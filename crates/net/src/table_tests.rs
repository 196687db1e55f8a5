use std::net::IpAddr;

use super::*;
use crate::flow::FlowProtocol;
use crate::frame::Link;
use crate::header::Offloads;
use crate::network::GuestNetwork;
use crate::seq::Seq;

#[test]
fn a_flow_makes_some_frames_in_a_row_and_then_the_next_one_does() {
    let link = Link { network: GuestNetwork::default(), offloads: Offloads::default() };
    let (mut shared, mut table) = (Shared::new(link), Table::new().unwrap());
    let now = Instant::now();
    let ids = [1, 2].map(|port| {
        let guest: IpAddr = link.network.ipv4.address.into();
        let key = FlowKey::new(FlowProtocol::Tcp, (guest, port), ([192, 0, 2, 1].into(), 80));
        let flow = TcpFlow::call(key, Seq(7), now, &mut shared);
        let id = table.insert(key, Flow::Tcp(Box::new(flow)), now);
        table.changed(id, now, &mut shared);
        id
    });
    let mut turns = Vec::new();
    for _ in 0..12 {
        let id = table.next_ready().unwrap();
        turns.push(id);
        table.made(id, TURN / 3 + 1, now, &mut shared);
    }
    assert_eq!(turns, [[ids[0]; 3], [ids[1]; 3]].repeat(2).concat());
    // One that has nothing more loses its turn.
    let id = table.next_ready().unwrap();
    table.idle(id, now, &mut shared);
    assert_eq!([(); 3].map(|()| table.next_ready()), [Some(ids[1]), None, None]);
}
