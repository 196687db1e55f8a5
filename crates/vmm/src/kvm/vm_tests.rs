use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, kvm_clock_data, kvm_ioapic_state,
    kvm_ioapic_state__bindgen_ty_1, kvm_irqchip, kvm_irqchip__bindgen_ty_1,
};

use super::{REDIRECTION_MASKED, VmState};

#[test]
fn only_unmasked_pins_accept_interrupts() {
    let mut redirtbl = [kvm_ioapic_state__bindgen_ty_1 { bits: REDIRECTION_MASKED }; 24];
    redirtbl[5].bits = 0x31;
    let ioapic = kvm_ioapic_state { redirtbl, ..Default::default() };
    let ioapic = kvm_irqchip {
        chip_id: KVM_IRQCHIP_IOAPIC,
        chip: kvm_irqchip__bindgen_ty_1 { ioapic },
        ..Default::default()
    };
    // Bytes of another chip, which has no pins.
    let pic = kvm_irqchip { chip_id: KVM_IRQCHIP_PIC_MASTER, ..Default::default() };
    let state = |irqchips| VmState { irqchips, clock: kvm_clock_data::default() };

    let both = state(vec![pic, ioapic]);
    let accepted: Vec<u32> = (0..64).filter(|gsi| both.accepts(*gsi)).collect();
    assert_eq!(accepted, [5]);
    assert!(!both.accepts(u32::MAX));
    assert!(!state(vec![pic]).accepts(5));
}
