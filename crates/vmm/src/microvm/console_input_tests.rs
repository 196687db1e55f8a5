use std::fs::File;
use std::io::Write;

use event_manager::{EventManager, SubscriberOps};
use parking_lot::Mutex;

use super::super::event;
use super::*;
use crate::console::{Console, SerialRegisters};
use crate::subscriber::Subscriber;

const DATA: u16 = 0x3f8;
const LINE_STATUS: u16 = 0x3fd;

fn serve(input: OwnedFd) -> (Arc<Bus>, EventManager<Subscriber>) {
    let room = event().unwrap();
    let port = SerialRegisters::default().into_port(
        event().unwrap(),
        Console::default(),
        Some(room.try_clone().unwrap()),
    );
    let bus = Arc::new(Bus::new(port.unwrap(), None));
    let mut events: EventManager<Subscriber> = EventManager::new().unwrap();
    let input = ConsoleInput::new(input, room, bus.clone());
    events.add_subscriber(Subscriber::new(Arc::new(Mutex::new(input))));
    (bus, events)
}

fn port(bus: &Bus, port: u16) -> u8 {
    let mut data = [0];
    bus.port_read(port, &mut data);
    data[0]
}

fn run(events: &mut EventManager<Subscriber>) {
    while events.run_with_timeout(0).unwrap() > 0 {}
}

#[test]
fn everything_arrives_however_slowly_the_guest_reads() {
    let (input, output) = rustix::pipe::pipe().unwrap();
    let (bus, mut events) = serve(input);
    let sent: Vec<u8> = (0..5000u32).map(|byte| u8::try_from(byte % 251).unwrap()).collect();
    let mut output = File::from(output);
    output.write_all(&sent).unwrap();
    drop(output);
    let mut received = Vec::new();
    loop {
        run(&mut events);
        if port(&bus, LINE_STATUS) & 1 == 0 {
            break;
        }
        while port(&bus, LINE_STATUS) & 1 != 0 {
            received.push(port(&bus, DATA));
        }
    }
    assert!(received == sent, "{} bytes of {}", received.len(), sent.len());
}

#[test]
fn a_file_without_events_is_no_input() {
    let (bus, mut events) = serve(File::open("/dev/null").unwrap().into());
    run(&mut events);
    assert_eq!(port(&bus, LINE_STATUS) & 1, 0);
}
