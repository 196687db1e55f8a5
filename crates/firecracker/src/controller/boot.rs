//! Booting a kernel.

use firn_vmm::BootConfig;

use super::devices::unbind;
use super::{Answer, Controller, MemorySource, Running, log_kick, open};
use crate::config::Drive;
use crate::fault::Fault;
use crate::vmm::Origin;

/// The command line of a kernel for which the client sent none.
const DEFAULT_ARGUMENTS: &str = "reboot=k panic=1 nomodule 8250.nr_uarts=0 i8042.noaux \
                                 i8042.nomux i8042.dumbkbd swiotlb=noforce";

impl Controller {
    /// Boots the microVM.
    pub(super) fn boot(&mut self) -> Result<Answer, Fault> {
        self.before_start()?;
        self.confine()?;
        let source = self.config.boot_source.as_ref();
        let source = source.ok_or_else(|| Fault::new("there is no kernel: PUT /boot-source"))?;
        let initramfs = source.initrd_path.as_deref();
        let arguments = source.boot_args.as_deref().unwrap_or(DEFAULT_ARGUMENTS);
        let machine = &self.config.machine_config;
        let config = BootConfig {
            kernel: open("kernel_image_path", &source.kernel_image_path)?,
            initramfs: initramfs.map(|path| open("initrd_path", path)).transpose()?,
            cmdline: self.command_line(arguments),
            device_arguments: true,
            legacy_devices: true,
            vcpus: machine.vcpu_count,
            smt: machine.smt && machine.vcpu_count > 1,
            cpu: machine.cpu(),
            memory: machine.memory(),
            track_writes: machine.track_dirty_pages,
            devices: self.guest_devices()?,
            host: self.host(&self.config)?,
        };
        let started = self.vmm.start(Origin::Boot(Box::new(config)));
        let (handle, _) = started.inspect_err(|_| unbind(&self.config))?;
        log_kick();
        self.running = Some(Running { handle, paused: false, memory: MemorySource::Boot });
        Ok(Answer::Done)
    }

    /// The client's arguments, and the root device's.
    fn command_line(&self, arguments: &str) -> String {
        let root = self.config.drives.iter().find(|drive| drive.is_root_device);
        let Some(Drive { partuuid, is_read_only, .. }) = root else { return arguments.to_owned() };
        let device = match partuuid {
            Some(partition) => format!("PARTUUID={partition}"),
            None => "/dev/vda".to_owned(),
        };
        let mode = if is_read_only.unwrap_or_default() { "ro" } else { "rw" };
        format!("{arguments} root={device} {mode}")
    }
}
