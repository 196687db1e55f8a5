use kvm_bindings::kvm_lapic_state;

use super::*;

const MSR_APIC_BASE: u32 = 0x1b;

fn state(msrs: &[(u32, u64)], count: &[(usize, c_char)]) -> VcpuState {
    let entry = |(index, data): &(u32, u64)| kvm_msr_entry {
        index: *index,
        data: *data,
        ..Default::default()
    };
    let mut lapic = kvm_lapic_state::default();
    count.iter().for_each(|(at, byte)| lapic.regs[*at] = *byte);
    VcpuState {
        cpuid: Vec::new(),
        mp_state: kvm_mp_state::default(),
        regs: kvm_regs::default(),
        sregs: kvm_sregs::default(),
        xsave: kvm_xsave::default(),
        xcrs: kvm_xcrs::default(),
        debug_regs: kvm_debugregs::default(),
        lapic,
        msrs: msrs.iter().map(entry).collect(),
        events: kvm_vcpu_events::default(),
        tsc_khz: 1,
    }
}

#[test]
fn timers_leave_the_state_and_the_counter_stays_before_its_deadline() {
    let msrs = [(MSR_APIC_BASE, 1), (MSR_TSC, 2), (MSR_TSC_DEADLINE, 3)];
    // The timer's vector at 0x320 is no part of the count-down, its divider at 0x3e0 neither.
    let mut state = state(&msrs, &[(0x320, 7), (0x380, 8), (0x390, 9), (0x3e0, 10)]);
    let timers = Timers::take(&mut state);
    let indices = |msrs: &[kvm_msr_entry]| msrs.iter().map(|msr| msr.index).collect::<Vec<_>>();
    assert_eq!(indices(&state.msrs), [MSR_APIC_BASE]);
    assert_eq!(indices(&timers.msrs), [MSR_TSC, MSR_TSC_DEADLINE]);
    let register = |at: usize| state.lapic.regs[at];
    assert_eq!([0x320, 0x380, 0x390, 0x3e0].map(register), [7, 0, 0, 10]);
    let count = timers.count.unwrap();
    assert_eq!((count[0], count[0x10]), (8, 9));
}

#[test]
fn a_local_apic_that_does_not_count_is_not_set_again() {
    assert_eq!(Timers::take(&mut state(&[], &[(0x320, 7)])).count, None);
}
