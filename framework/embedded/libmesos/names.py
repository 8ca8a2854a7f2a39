"""Mangled names of the C++ functions that are called, each with its declaration as a comment."""

from __future__ import annotations

# Parts of mangled names.
STRING = "NSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
OPTION_STRING = f"RK6OptionI{STRING}E"
SLAVE = "_ZN5mesos8internal5slave"
MASTER = "_ZN5mesos8internal6master"
CONTAINERIZER_LAUNCH = f"{SLAVE}24MesosContainerizerLaunch"

# mesos::internal::logging::initialize(const string& argv0, bool, const Option<Flags>&)
LOGGING_INITIALIZE = f"_ZN5mesos8internal7logging10initializeERK{STRING}bRK6OptionINS1_5FlagsEE"
# process::initialize(const Option<string>& delegate, readwriteRealm, readonlyRealm)
PROCESS_INITIALIZE = f"_ZN7process10initializeERK6OptionI{STRING}ES9_S9_"
# mesos::internal::VersionProcess::VersionProcess()
VERSION_PROCESS = "_ZN5mesos8internal14VersionProcessC1Ev"
# process::spawn(ProcessBase*, bool manage)
SPAWN = "_ZN7process5spawnEPNS_11ProcessBaseEb"
# process::wait(const UPID&, const Duration&)
WAIT = "_ZN7process4waitERKNS_4UPIDERK8Duration"
# flags::FlagsBase::load(const string& prefix)
FLAGS_LOAD = f"_ZN5flags9FlagsBase4loadERK{STRING}"
# flags::FlagsBase::load(const Option<string>& prefix, int argc, const char* const* argv, bool, bool)
FLAGS_LOAD_ARGUMENTS = f"_ZN5flags9FlagsBase4loadERK6OptionI{STRING}EiPKPKcbb"
# mesos::internal::local::Flags::Flags()
LOCAL_FLAGS = "_ZN5mesos8internal5local5FlagsC1Ev"
# mesos::internal::local::launch(const Flags&, mesos::allocator::Allocator*)
LOCAL_LAUNCH = "_ZN5mesos8internal5local6launchERKNS1_5FlagsEPNS_9allocator9AllocatorE"
# mesos::internal::slave::Flags::Flags()
SLAVE_FLAGS = f"{SLAVE}5FlagsC1Ev"
# Fetcher::Fetcher(const Flags&)
FETCHER = f"{SLAVE}7FetcherC1ERKNS1_5FlagsE"
# GarbageCollector::GarbageCollector(const string& workDir)
GARBAGE_COLLECTOR = f"{SLAVE}16GarbageCollectorC1ERK{STRING}"
# mesos::SecretResolver::create(const Option<string>& moduleName)
SECRET_RESOLVER = f"_ZN5mesos14SecretResolver6createE{OPTION_STRING}"
# Containerizer::create(const Flags&, bool local, Fetcher*, GarbageCollector*, SecretResolver*, VolumeGidManager*,
#                       PendingFutureTracker*, CSIServer*)
CONTAINERIZER = (
    f"{SLAVE}13Containerizer6createERKNS1_5FlagsEbPNS1_7FetcherEPNS1_16GarbageCollectorE"
    "PNS_14SecretResolverEPNS1_16VolumeGidManagerEPNS0_20PendingFutureTrackerEPNS1_9CSIServerE"
)
# mesos::master::detector::MasterDetector::create(const Option<string>& zk, masterDetectorModule, Option<Duration>)
MASTER_DETECTOR = f"_ZN5mesos6master8detector14MasterDetector6createE{OPTION_STRING}SC_RKS3_I8DurationE"
# mesos::internal::Files::Files(const Option<string>& authenticationRealm, const Option<Authorizer*>&)
FILES = f"_ZN5mesos8internal5FilesC1E{OPTION_STRING}RKS2_IPNS_10AuthorizerEE"
# TaskStatusUpdateManager::TaskStatusUpdateManager(const Flags&)
STATUS_UPDATE_MANAGER = f"{SLAVE}23TaskStatusUpdateManagerC1ERKNS1_5FlagsE"
# mesos::slave::ResourceEstimator::create(const Option<string>& type)
RESOURCE_ESTIMATOR = f"_ZN5mesos5slave17ResourceEstimator6createE{OPTION_STRING}"
# mesos::slave::QoSController::create(const Option<string>& type)
QOS_CONTROLLER = f"_ZN5mesos5slave13QoSController6createE{OPTION_STRING}"
# Slave::Slave(const string& id, const Flags&, MasterDetector*, Containerizer*, Files*, GarbageCollector*,
#              TaskStatusUpdateManager*, ResourceEstimator*, QoSController*, SecretGenerator*, VolumeGidManager*,
#              PendingFutureTracker*, Owned<CSIServer>&&, const Option<unix::Socket>&, const Option<Authorizer*>&)
SLAVE_PROCESS = (
    f"{SLAVE}5SlaveC1ERK{STRING}RKNS1_5FlagsEPNS_6master8detector14MasterDetectorE"
    "PNS1_13ContainerizerEPNS0_5FilesEPNS1_16GarbageCollectorE"
    "PNS1_23TaskStatusUpdateManagerEPNS_5slave17ResourceEstimatorEPNSQ_13QoSControllerE"
    "PNS_15SecretGeneratorEPNS1_16VolumeGidManagerEPNS0_20PendingFutureTrackerE"
    "ON7process5OwnedINS1_9CSIServerEEERK6OptionINS11_7network8internal6SocketI"
    "NS17_4unix7AddressEEEERKS16_IPNS_10AuthorizerEE"
)
# MesosContainerizerLaunch::Flags::Flags() and MesosContainerizerLaunch::execute()
LAUNCH_FLAGS = f"{CONTAINERIZER_LAUNCH}5FlagsC1Ev"
LAUNCH_EXECUTE = f"{CONTAINERIZER_LAUNCH}7executeEv"
# mesos::internal::master::Flags::Flags()
MASTER_FLAGS = f"{MASTER}5FlagsC1Ev"
# HierarchicalDRFAllocator::HierarchicalDRFAllocator()
ALLOCATOR = f"{MASTER}9allocator14MesosAllocatorINS2_28HierarchicalAllocatorProcessINS2_9DRFSorterES5_EEEC1Ev"
# mesos::state::InMemoryStorage::InMemoryStorage()
IN_MEMORY_STORAGE = "_ZN5mesos5state15InMemoryStorageC1Ev"
# Registrar::Registrar(const Flags&, mesos::state::State*, const Option<string>& authenticationRealm)
REGISTRAR = f"{MASTER}9RegistrarC1ERKNS1_5FlagsEPNS_5state5StateE{OPTION_STRING}"
# mesos::master::contender::MasterContender::create(const Option<string>& zk, masterContenderModule, Option<Duration>)
MASTER_CONTENDER = f"_ZN5mesos6master9contender15MasterContender6createE{OPTION_STRING}SC_RKS3_I8DurationE"
# Master::Master(Allocator*, Registrar*, Files*, MasterContender*, MasterDetector*, const Option<Authorizer*>&,
#                const Option<shared_ptr<RateLimiter>>&, const Flags&)
MASTER_PROCESS = (
    f"{MASTER}6MasterC1EPNS_9allocator9AllocatorEPNS1_9RegistrarEPNS0_5FilesE"
    "PNS_6master9contender15MasterContenderEPNSA_8detector14MasterDetectorE"
    "RK6OptionIPNS_10AuthorizerEERKSH_ISt10shared_ptrIN7process11RateLimiterEEERKNS1_5FlagsE"
)
