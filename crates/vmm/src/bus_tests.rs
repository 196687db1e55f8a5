use std::sync::Arc;

use parking_lot::Mutex;
use vmm_sys_util::eventfd::EventFd;

use super::{Bus, MmioDevice, PowerRequest};
use crate::console::{Console, SerialCounters, SerialRegisters};
use crate::i8042::{Keyboard, KeyboardCounters, KeyboardState};

#[derive(Default)]
struct Recorder {
    writes: Vec<(u64, Vec<u8>)>,
}

impl MmioDevice for Recorder {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(u8::try_from(offset).unwrap());
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.writes.push((offset, data.to_vec()));
    }
}

fn event() -> EventFd {
    EventFd::new(libc::EFD_NONBLOCK).unwrap()
}

fn bus_with(keyboard: Option<Keyboard>) -> (Bus, Console) {
    let console = Console::default();
    let serial = SerialRegisters::default().into_port(event(), console.clone(), None);
    (Bus::new(serial.unwrap(), keyboard), console)
}

fn bus() -> (Bus, Console) {
    bus_with(None)
}

#[test]
fn accesses_reach_only_the_device_whose_window_contains_them() {
    let (mut bus, _) = bus();
    let device = Arc::new(Mutex::new(Recorder::default()));
    bus.add(0x1000, 0x100, device.clone()).unwrap();

    let mut data = [0; 4];
    bus.mmio_read(0x1008, &mut data);
    assert_eq!(data, [8; 4]);
    bus.mmio_write(0x10fc, &[1, 2, 3, 4]);
    assert_eq!(device.lock().writes, [(0xfc, vec![1, 2, 3, 4])]);

    // Straddling the end, before the start, far away: all ones, no write.
    for address in [0x10fd, 0xffc, 0x1100, u64::MAX - 1] {
        bus.mmio_read(address, &mut data);
        assert_eq!(data, [0xff; 4], "{address:#x}");
        bus.mmio_write(address, &[0; 4]);
    }
    assert_eq!(device.lock().writes.len(), 1);
}

#[test]
fn overlapping_windows_are_refused() {
    let (mut bus, _) = bus();
    let device = Arc::new(Mutex::new(Recorder::default()));
    bus.add(0x1000, 0x100, device.clone()).unwrap();
    for (start, len) in [(0x1000, 1), (0xfff, 2), (0x10ff, 1), (0, 0x2000), (u64::MAX, 2)] {
        assert!(bus.add(start, len, device.clone()).is_err(), "{start:#x}+{len}");
    }
    bus.add(0x1100, 0x100, device.clone()).unwrap();
    bus.add(0xf00, 0x100, device).unwrap();
}

#[test]
fn only_complete_power_requests_are_recognised() {
    let (bus, _) = bus();
    // SLP_TYP 5 in bits 2 to 4, SLP_EN in bit 5.
    assert_eq!(bus.port_write(0x600, &[5 << 2 | 1 << 5]), Some(PowerRequest::Off));
    assert_eq!(bus.port_write(0x600, &[5 << 2]), None);
    assert_eq!(bus.port_write(0x600, &[1 << 2 | 1 << 5]), None);
    assert_eq!(bus.port_write(0x602, &[1]), Some(PowerRequest::Reset));
    assert_eq!(bus.port_write(0x602, &[1, 0]), None);
    // Only where there is a keyboard controller.
    assert_eq!(bus.port_write(0x64, &[0xfe]), None);
    let keyboard = Keyboard::new(KeyboardState::default(), event()).unwrap();
    let (bus, _) = bus_with(Some(keyboard));
    assert_eq!(bus.port_write(0x64, &[0xfe]), Some(PowerRequest::Reset));
    assert_eq!(bus.port_write(0x64, &[0xfe, 0]), None);
    assert_eq!(bus.port_write(0x60, &[0xfe]), None);
}

#[test]
fn a_keyboard_controller_answers_at_its_ports() {
    let keyboard = Keyboard::new(KeyboardState::default(), event()).unwrap();
    let (bus, _) = bus_with(Some(keyboard));
    let read = |bus: &Bus, port| {
        let mut byte = [0];
        bus.port_read(port, &mut byte);
        byte[0]
    };
    assert_eq!(read(&bus, 0x64) & 1, 0);
    bus.port_write(0x64, &[0xaa]);
    assert_eq!(read(&bus, 0x64) & 1, 1);
    assert_eq!(read(&bus, 0x60), 0x55);
    bus.port_read(0x60, &mut [0; 2]);
    bus.port_write(0x64, &[0; 2]);
    bus.port_write(0x64, &[0xfe]);
    let expected =
        KeyboardCounters { reads: 3, writes: 2, invalid_reads: 1, invalid_writes: 1, resets: 1 };
    assert_eq!(bus.keyboard().unwrap().counters, expected);
    assert_eq!(read(&bus_with(None).0, 0x64), 0xff);
}

#[test]
fn serial_output_is_kept() {
    let (bus, console) = bus();
    for byte in b"one\r\ntwo\r\nthree\r\n" {
        bus.port_write(0x3f8, &[*byte]);
    }
    assert_eq!(console.tail(2), "two\nthree");
    let mut odd = [0u8; 2];
    bus.port_read(0x3f8, &mut odd);
    assert_eq!(odd, [0xff; 2]);
    assert_eq!(bus.port_write(0x3f8, &odd), None);
    let expected = SerialCounters {
        writes: 17,
        invalid_reads: 1,
        invalid_writes: 1,
        ..SerialCounters::default()
    };
    assert_eq!(bus.serial_counters(), expected);
}
