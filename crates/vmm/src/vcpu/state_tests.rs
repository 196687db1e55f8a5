use kvm_bindings::kvm_lapic_state;

use super::*;
use crate::kvm::{KVM_DEVICE, OpenKvm};

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

/// What a vCPU has already is not set, and it has the whole state all the same.
#[test]
fn a_fresh_vcpu_and_another_one_have_the_same_state_after_the_restore() {
    const MSR_STAR: u32 = 0xc000_0081;
    let open = OpenKvm::open(KVM_DEVICE.as_ref()).unwrap();
    let kvm = &open.kvm;
    let vcpu = || {
        let vm = kvm.create_vm().unwrap();
        vm.create_irq_chip().unwrap();
        (vm.create_vcpu(0).unwrap(), vm)
    };
    let indices = msr_indices(kvm).unwrap();
    let size = 4096;
    let (fd, _vm) = vcpu();
    fd.set_cpuid2(&open.cpuid).unwrap();
    let mut wanted = save(&fd, 0, &open.cpuid, &indices, size).unwrap();
    let star = wanted.msrs.iter_mut().find(|msr| msr.index == MSR_STAR).unwrap();
    star.data = 0x0023_0010_0000_0000;
    wanted.regs.rbx = 7;

    let without_time = |mut state: VcpuState| {
        Timers::take(&mut state);
        state
    };
    let restored = [false, true].map(|is_fresh| {
        let (fd, _vm) = vcpu();
        let fresh = is_fresh.then(|| Fresh::set_up(kvm, &fd, open.cpuid.clone()).unwrap());
        assert!(fresh.iter().all(|fresh| fresh.msrs.len() > 10));
        restore(kvm, &fd, 0, &wanted, fresh).unwrap();
        without_time(save(&fd, 0, &open.cpuid, &indices, size).unwrap())
    });
    let wanted = without_time(wanted);
    for state in restored {
        assert_eq!(state.msrs, wanted.msrs);
        assert_eq!((state.regs, state.sregs), (wanted.regs, wanted.sregs));
    }
}
